"""An extension of griffe: a docstring's section begins at its header, with a blank line above it or without."""

import re
from typing import Any

import griffe

_HEADER = re.compile(r"(?<=\S)\n(?= *(?:Args|Attributes|Returns|Raises|Yields):\n)")


class DocstringSections(griffe.Extension):
    """Adds the blank lines, which griffe asks for and Sphinx does not."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """After a module, class, function or attribute was read."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADER.sub("\n\n", obj.docstring.value)
