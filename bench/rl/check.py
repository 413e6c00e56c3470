"""Before a trainer's variant is timed: are its logprobs and gradients near those of bf16?"""

import dataclasses

import torch

from bench.rl.synthetic import build_policy
from bench.serve.check import MAX_FP8_ERROR
from octavo.models import Decoder, ModelConfig, sequence_logprobs
from octavo.nn import Linear
from octavo.numerics import Numerics

# Of all linears' gradients at once, after two layers. FP8 in all three products leaves 0.985 at a width of 1024; a
# gradient of another token, layer or scale leaves next to nothing.
MIN_COSINE = 0.9
_CHECKED_LAYERS = 2
_LENGTHS = (130, 97, 64)


def check_gradients(config: ModelConfig, numerics: Numerics, device: str) -> tuple[float, float]:
    """A trainer's logprobs and gradients against bf16's of the same weights; the first layers of a shape.

    Returns:
        (relative error of the logprobs, cosine between the gradients of all linears); (0, 1) for bf16 itself.
    Raises:
        AssertionError: one is beyond its bound.
    """
    layers = min(_CHECKED_LAYERS, config.num_layers)
    few = dataclasses.replace(config, num_layers=layers, max_position_embeddings=max(_LENGTHS) + 1)
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(few.vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]
    model = build_policy(few, Numerics(), device)
    expected, wanted = _logprobs_and_gradient(model, sequences)
    model.set_numerics(numerics)
    found, gradient = _logprobs_and_gradient(model, sequences)
    error = ((found - expected).square().mean().sqrt() / expected.std()).item()
    cosine = _dot(wanted, gradient) / (_dot(wanted, wanted) * _dot(gradient, gradient)) ** 0.5
    assert error <= MAX_FP8_ERROR, f"logprobs are off bf16's by {error:.3f} of their spread, allowed: {MAX_FP8_ERROR}"
    assert cosine >= MIN_COSINE, f"gradients have cosine {cosine:.3f} with bf16's, at least {MIN_COSINE} expected"
    return error, cosine


def _dot(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Of two vectors that are cut into tensors; fp32 would lose digits over so many numbers."""
    return sum((x.double() * y.double()).sum().item() for x, y in zip(a, b, strict=True))


def _logprobs_and_gradient(model: Decoder, sequences: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """([tokens] fp32, each linear's gradient) of a loss that weighs tokens up and down."""
    model.zero_grad(set_to_none=True)
    logprobs = torch.cat(sequence_logprobs(model, sequences))
    signs = 1.0 - 2.0 * (torch.arange(len(logprobs), device=logprobs.device) % 2)
    (logprobs * signs).mean().backward()  # type: ignore[no-untyped-call]
    weights = [m.weight for name, m in model.named_modules() if isinstance(m, Linear) and name != "lm_head"]
    grads = [w.grad for w in weights if w is not None and w.grad is not None]
    assert len(grads) == len(weights), f"{len(weights) - len(grads)} linears have no gradient"
    model.zero_grad(set_to_none=True)
    return logprobs.detach(), grads
