"""What several tests of linears watch."""

import pytest

from octavo.nn.weights import cached, operands


class QuantizerCalls(list[tuple[str, bool]]):
    """Names of the quantizers that linears called for their weights, with whether they were given a place."""

    def take(self) -> list[str]:
        """The names so far, which are then forgotten."""
        names = [name for name, _ in self]
        self.clear()
        return names


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> QuantizerCalls:
    found = QuantizerCalls()

    def watch(module: object, name: str) -> None:
        run = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, **options: (found.append((name, bool(options.get("out")))), run(*a, **options))[1]
        )

    for name in ("quantize", "quantize_columns", "quantize_both"):
        for module in (operands, cached):
            if hasattr(module, name):
                watch(module, name)
    return found
