"""The console of the commands: words as they are, since a path or a pattern may look like rich's markup or an emoji."""

from rich.console import Console


def plain_console(*, stderr: bool = False, min_width: int = 0) -> Console:
    """Prints text and tables without markup, emoji and highlighting, where there is no terminal at least so wide."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, min_width)
    return console
