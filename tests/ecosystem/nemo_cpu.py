"""NeMo AutoModel 0.7 without a GPU, for tests alone. It asks CUDA for a device, and for how much memory was in use."""

import functools
import sys
from typing import Any

import torch
from nemo_automodel._transformers import auto_model

torch.cuda.current_device = lambda: 0
torch.cuda.max_memory_allocated = lambda *_: 0
torch.cuda.reset_peak_memory_stats = lambda *_: None

_apply = auto_model.apply_model_infrastructure


@functools.wraps(_apply)
def _on_the_cpu(*arguments: Any, device: Any, **options: Any) -> Any:
    """The device that CUDA named is where NeMo puts the weights."""
    return _apply(*arguments, device=torch.device("cpu"), **options)


auto_model.apply_model_infrastructure = _on_the_cpu

if __name__ == "__main__":
    from nemo_automodel.cli.app import main

    sys.exit(main())
