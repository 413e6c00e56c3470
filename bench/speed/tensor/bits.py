"""`bits`: hidden states, logprobs and samples of a model that is cut by gather, against one GPU's, in bits."""

import dataclasses

import torch

from bench.speed.scale.session import Session
from bench.speed.tensor.models import GATHER_EXACT, ONE_GPU_EXACT, Layout, build, config_of
from octavo.models import Decoder, sequence_logprobs
from octavo.nn import PackedContext
from octavo.serve import LLM, SamplingParams
from octavo.testing.assertions import assert_bitwise

RECIPES = ("bf16", "rowwise", "blockwise")
DIFFERING = "hidden numbers that differ"
_NUM_LAYERS, _NUM_TOKENS = 4, 72
# around the ends of pages; the last one is cut into chunks; enough to decode at once that ranks share the sampled rows
_PROMPT_LENS = (*range(9, 37), 5, 63, 64, 130, 400)
_LONG_PROMPT_LEN = 3001  # whose norms each rank computes for a share of the tokens
_LIMITS = {"max_num_seqs": 32, "max_num_batched_tokens": 128, "max_model_len": 512, "num_kv_pages": 48}  # preempts


@dataclasses.dataclass(frozen=True)
class Found:
    """What a layout computes."""

    hidden: torch.Tensor
    scores: torch.Tensor
    sampled: torch.Tensor
    tokens: list[list[int]]
    num_preemptions: int


def bits(session: Session) -> None:
    """A recipe at a time."""
    for recipe in RECIPES:
        session.attempt(f"bits {recipe}", lambda recipe=recipe: _compare(session, recipe))  # type: ignore[misc]


def case_label(recipe: str, num_gpus: int) -> str:
    """A case's name in the record."""
    return f"gather on {num_gpus} GPUs against one, Qwen3-8B ({_NUM_LAYERS} layers), {recipe}, FP8 KV, exact"


def _compare(session: Session, recipe: str) -> None:
    one = _compute(session, recipe, ONE_GPU_EXACT)
    session.free()
    cut = _compute(session, recipe, GATHER_EXACT)

    def check() -> None:
        assert_bitwise(cut.hidden, one.hidden, f"{recipe}: hidden states")
        assert_bitwise(cut.scores, one.scores, f"{recipe}: sequence_logprobs")
        assert cut.tokens == one.tokens, f"{recipe}: samples differ"
        assert_bitwise(cut.sampled, one.sampled, f"{recipe}: the samples' logprobs")
        assert_bitwise(one.sampled, one.scores[-len(one.sampled) :], f"{recipe}: sampler against trainer")
        assert cut.num_preemptions == one.num_preemptions > 0, "sequences were preempted"

    session.check(check)
    case = case_label(recipe, session.mesh.world_size)
    session.record.add(case, DIFFERING, "", 0.0)
    session.record.add(case, "hidden numbers compared", "", one.hidden.numel())
    session.record.add(case, "sampled tokens compared, with their logprobs", "tokens", one.sampled.numel())
    session.say(f"{case}: 0 of {one.hidden.numel():,} hidden numbers and of {one.sampled.numel()} samples differ")


@torch.no_grad()
def _compute(session: Session, recipe: str, layout: Layout) -> Found:
    config = config_of(session, _NUM_LAYERS)
    model = build(session, config, layout, recipe)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in _PROMPT_LENS]
    lengths = [len(prompt) for prompt in prompts]
    long_len = min(_LONG_PROMPT_LEN, config.max_position_embeddings)
    long_prompt = torch.randint(config.vocab_size, (long_len,), generator=generator).tolist()
    hidden = torch.cat([_hidden(model, prompts), _hidden(model, [long_prompt])])
    llm = LLM(model, warm_up=False, **_LIMITS)  # type: ignore[arg-type]
    llm.engine.scheduler.plan_known_lengths = False  # so that sequences outgrow the cache and are preempted
    params = SamplingParams(temperature=1.0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=0)
    llm.generate([prompts[-1][:256]], dataclasses.replace(params, max_tokens=1))  # its pages are met again
    outputs = llm.generate(prompts, params)
    sampled = torch.tensor([x for output in outputs for x in output.outputs[0].logprobs.sampled])  # type: ignore[union-attr]
    tokens = [output.outputs[0].token_ids for output in outputs]
    whole = [prompt + answer for prompt, answer in zip(prompts, tokens, strict=True)]
    scores = torch.cat(sequence_logprobs(model, whole, prompt_lens=lengths)).cpu()
    return Found(hidden.cpu(), scores, sampled, tokens, llm.stats.num_preemptions)


def _hidden(model: Decoder, prompts: list[list[int]]) -> torch.Tensor:
    context = PackedContext.from_lengths(
        [len(prompt) for prompt in prompts], model.numerics, model.device, model.kv_table
    )
    return model(torch.tensor([i for prompt in prompts for i in prompt], device=model.device), context)
