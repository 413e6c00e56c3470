"""The third stage: text from the FP8 export through the FP8 KV cache, and its logprobs checked bit by bit."""

import dataclasses

import torch

from bench.demo.compare import EXPORTED, Comparison
from bench.demo.display import Display
from bench.demo.pretrain import Pretraining
from octavo.errors import ExactnessError
from octavo.models import load_model, sequence_logprobs
from octavo.models.tokenizer import Tokenizer
from octavo.serve import LLM, SamplingParams

PROMPTS = (
    "import ",
    "def __init__(self",
    "    def read(self, size=-1):\n",
    "class TestCase(",
    "for key, value in ",
    "    return ",
)
_MAX_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt and what followed it."""

    prompt: str
    text: str


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What was sampled and how its logprobs compare with the trainer's side.

    Attributes:
        num_tokens: sampled and compared.
        max_delta_exact: largest |trainer - sampler| logprob under the same exact numerics: 0.0, or the demo fails.
        mean_delta_bf16: mean of it for a trainer that scores the same text in bf16.
        max_delta_bf16: largest of it for such a trainer.
        tokens_per_s: of the exact engine on this machine.
        kv_bytes_bf16: a token's keys and values in all layers, in bf16.
        kv_bytes_fp8: the same in FP8, scales included.
    """

    samples: list[Sample]
    num_tokens: int
    max_delta_exact: float
    mean_delta_bf16: float
    max_delta_bf16: float
    tokens_per_s: float
    kv_bytes_bf16: int
    kv_bytes_fp8: int


def sample(
    pretraining: Pretraining, comparison: Comparison, tokenizer: Tokenizer, device: str, seed: int, display: Display
) -> Sampling:
    """Sample a few completions in exact mode, then score the same tokens exactly and in bf16."""
    model = load_model(comparison.export_path, device=device, recipe=EXPORTED, kv_cache_dtype="fp8", exact=True)
    llm = LLM(model, tokenizer=tokenizer, seed=seed, warm_up=False)
    params = SamplingParams(temperature=0.8, max_tokens=_MAX_TOKENS, logprobs=0)
    outputs = llm.generate(list(PROMPTS), params, use_progress=display.console.is_terminal)
    completions = [output.outputs[0] for output in outputs]
    sequences = [[*output.prompt_token_ids, *c.token_ids] for output, c in zip(outputs, completions, strict=True)]
    sampled = torch.tensor([logprob for c in completions if c.logprobs is not None for logprob in c.logprobs.sampled])
    hp_model = load_model(pretraining.variants[EXPORTED].model_path, device=device)
    deltas, prompt_lens = [], [len(output.prompt_token_ids) for output in outputs]
    for scorer in (model, hp_model):
        with torch.no_grad():
            scored = sequence_logprobs(scorer, sequences, temperature=params.temperature, prompt_lens=prompt_lens)
        deltas.append((torch.cat(scored).cpu() - sampled).abs())
    if not torch.equal(deltas[0], torch.zeros_like(deltas[0])):
        raise ExactnessError(
            f"exact mode promises equal bits, but {int((deltas[0] != 0).sum())} of {len(sampled)} sampled tokens have "
            f"another logprob on the trainer's side (by at most {float(deltas[0].max())}); this is a bug of octavo's"
        )
    config = model.config
    return Sampling(
        samples=[Sample(prompt, c.text) for prompt, c in zip(PROMPTS, completions, strict=True)],
        num_tokens=len(sampled),
        max_delta_exact=float(deltas[0].max()),
        mean_delta_bf16=float(deltas[1].mean()),
        max_delta_bf16=float(deltas[1].max()),
        tokens_per_s=llm.stats.output_tokens_per_s,
        kv_bytes_bf16=2 * config.num_layers * config.kv_dim * 2,
        kv_bytes_fp8=2 * config.num_layers * (config.kv_dim + 4 * config.num_kv_heads),
    )
