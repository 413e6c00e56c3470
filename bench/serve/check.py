"""Before a variant is timed: are its tokens' logprobs what they must be?"""

import dataclasses

import torch

from bench.serve.measure import TEMPERATURE
from bench.serve.shapes import build_model
from octavo.models import Decoder, ModelConfig, sequence_logprobs
from octavo.numerics import Numerics
from octavo.serve import LLM, RequestOutput, SamplingParams

# Root mean square of the difference to bf16's logprobs over their standard deviation, after two layers of a shape.
# One of another model, position or cache page is 1.4 away. FP8's two operands leave 0.04 of each product, which add
# up: 0.20 in Qwen3-8B's shape (blockwise, FP8 KV), 0.05 to 0.15 in narrower ones of all three families; bf16's own
# error there is 0.002.
MAX_BF16_ERROR, MAX_FP8_ERROR = 0.05, 0.35
_CHECKED_LAYERS = 2
_PROMPT_LENS = (5, 63, 64, 97, 130)  # around the ends of pages and of chunks
_NUM_TOKENS, _TOY_TOKENS = 24, 8
_MAX_LEN, _NUM_PAGES = 256, 32


def check_nearness(config: ModelConfig, numerics: Numerics, device: str, *, quick: bool) -> float:
    """An engine's logprobs, by prefill and by decode, against bf16's of the same weights; the first layers of a shape.

    Returns:
        The relative error of the logprobs.
    Raises:
        AssertionError: it is above the bound.
    """
    few = dataclasses.replace(config, num_layers=min(_CHECKED_LAYERS, config.num_layers))
    llm = LLM(
        build_model(few, numerics, device),
        max_num_seqs=len(_PROMPT_LENS),
        max_num_batched_tokens=96,  # so that prompts come in chunks
        max_model_len=_MAX_LEN,
        num_kv_pages=_NUM_PAGES,
        enable_prefix_caching=False,
        warm_up=False,
    )
    outputs = _generate(llm, quick=quick)
    sampled = _sampled_logprobs(outputs)
    del llm
    expected = _trainer_logprobs(build_model(few, Numerics(), device), outputs)
    error = ((sampled - expected).square().mean().sqrt() / expected.std()).item()
    bound = MAX_FP8_ERROR if numerics.recipe.is_fp8 or numerics.kv_cache_dtype == "fp8" else MAX_BF16_ERROR
    assert error <= bound, f"logprobs are off bf16's by {error:.3f} of their spread, allowed are {bound}"
    return error


def check_exact(llm: LLM, *, quick: bool) -> float:
    """The largest difference between the sampler's logprobs and sequence_logprobs of the same model.

    Raises:
        AssertionError: it is not 0.
    """
    outputs = _generate(llm, quick=quick)
    delta = (_sampled_logprobs(outputs) - _trainer_logprobs(llm.model, outputs)).abs().max().item()
    assert delta == 0, f"exact mode: a sampled logprob differs from sequence_logprobs by {delta:.3g}"
    return delta


def _generate(llm: LLM, *, quick: bool) -> list[RequestOutput]:
    generator = torch.Generator().manual_seed(1)
    vocab_size = llm.model.config.vocab_size
    prompts = [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in _PROMPT_LENS]
    num_tokens = _TOY_TOKENS if quick else _NUM_TOKENS
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=num_tokens, ignore_eos=True, logprobs=0)
    return llm.generate(prompts, params)


def _sampled_logprobs(outputs: list[RequestOutput]) -> torch.Tensor:
    """[N] fp32."""
    found = [sample.logprobs for output in outputs for sample in output.outputs]
    return torch.tensor([x for logprobs in found if logprobs is not None for x in logprobs.sampled])


@torch.no_grad()
def _trainer_logprobs(model: Decoder, outputs: list[RequestOutput]) -> torch.Tensor:
    """[N] fp32 of the same tokens."""
    sequences = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
    prompt_lens = [len(o.prompt_token_ids) for o in outputs]
    return torch.cat(sequence_logprobs(model, sequences, TEMPERATURE, prompt_lens=prompt_lens)).cpu()
