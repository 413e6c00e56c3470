"""Which amaxes travel together over ranks: those of one converted model, whatever else this process still holds."""

from typing import Any

import pytest
import torch

from octavo import nn
from octavo.numerics import get_recipe


@pytest.mark.parametrize("is_set_later", [False, True], ids=["converted", "set later"])
def test_a_former_model_does_not_travel_along(is_set_later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives until the garbage collector comes, on each rank at another time; ranks then met in two sizes."""
    sizes: list[int] = []
    monkeypatch.setattr("octavo.distributed.amax.dist.is_initialized", lambda: True)
    monkeypatch.setattr("octavo.distributed.amax.reduce_largest", lambda values, _: sizes.append(len(values)))

    def train() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
        nn.convert(model, "blockwise" if is_set_later else "delayed")
        if is_set_later:
            model[1].set_recipe(get_recipe("delayed"))  # type: ignore[operator]
        for _ in range(2):
            model(torch.ones(4, 128)).sum().backward()
        return model

    kept = [train(), train()]
    assert len(kept) == 2
    assert sizes == ([3] * 4 if is_set_later else [6] * 4)
