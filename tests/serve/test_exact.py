"""The sampler's logprob of a token equals, in bits, the one that the trainer back-propagates through."""

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models import Decoder
from octavo.models.families import FAMILIES
from octavo.nn import plan_fusion
from octavo.ops import attention
from tests.serve.random_models import (
    gradient_step,
    make_model,
    max_gap,
    random_prompts,
    trainer_logprobs,
)

TEMPERATURE = 0.7
RECIPES = ("blockwise", "rowwise")


def gap_of_a_run(
    model: Decoder, batch: int, num_updates: int = 1, num_pages: int = 2, caching: tuple[bool, ...] = (True,)
) -> float:
    """max |delta logprob| before and after weight updates, over runs in which all happened that must not matter.

    The cache is too small for `batch` sequences at once, prompts are longer than a step and share their beginnings.
    With caching (True, False) each run is made again without prefix cache, so that preemption costs everything.
    """
    prompts = random_prompts(batch + 4, seed=batch, num_pages=num_pages)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=24, logprobs=0, ignore_eos=True)
    needed = [-(-(len(prompt) + 24) // 64) for prompt in prompts]
    num_kv_pages = max(*needed, int(0.7 * batch * sum(needed) / len(needed))) if batch > 1 else 16
    limits = {"max_num_seqs": batch, "max_num_batched_tokens": max(96, 12 * batch), "num_kv_pages": num_kv_pages}
    llm = LLM(model, plan_known_lengths=False, **limits)
    gap = 0.0
    for version in range(num_updates + 1):
        llm.stats.reset()
        outputs = []
        for llm.engine.page_manager.enable_prefix_caching in caching:
            outputs += llm.generate(prompts, params)
            llm.engine.check_integrity()
        assert llm.stats.num_prefix_hit_tokens > 0
        assert llm.stats.num_multi_chunk_prompts > 0
        assert batch == 1 or llm.stats.num_preemptions > 0  # a sequence alone always finds room
        assert batch == 1 or llm.stats.num_recomputed_tokens > 0
        trainer = trainer_logprobs(model, outputs, TEMPERATURE)
        assert all(scored.requires_grad for samples in trainer for scored in samples)
        assert torch.cat([scored for samples in trainer for scored in samples]).mean() < -0.5  # no foregone tokens
        gap = max(gap, max_gap(outputs, trainer))
        if version < num_updates:
            gradient_step(model, trainer)
    return gap


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "rowwise"),
        ("qwen3", "blockwise"),
        pytest.param("qwen3_moe", "blockwise", marks=pytest.mark.slow),
        *(pytest.param(f, r, marks=pytest.mark.largest) for f, r in (("llama", "blockwise"), ("qwen3", "rowwise"))),
        pytest.param("qwen2", "rowwise", marks=pytest.mark.slow),
    ],
)
def test_exact_with_everything_happening(family: str, recipe: str) -> None:
    assert gap_of_a_run(make_model(family, recipe), batch=6) == 0.0


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
def test_exact_one_at_a_time(kv_cache_dtype: str) -> None:
    assert gap_of_a_run(make_model(kv_cache_dtype=kv_cache_dtype), batch=1, num_updates=0) == 0.0


@pytest.mark.parametrize(
    ("family", "recipe", "batch"),
    [
        pytest.param("qwen3", "blockwise", 6, marks=pytest.mark.slow),
        ("llama", "rowwise", 1),
        pytest.param("qwen3_moe", "rowwise", 16, marks=pytest.mark.slow),
        *(pytest.param(f, "rowwise", 16, marks=pytest.mark.largest) for f in ("qwen3", "gptj")),
    ],
)
def test_exact_in_fp8_attention(family: str, recipe: str, batch: int) -> None:
    """Queries and probabilities in FP8 too: the scales of a row's probabilities are its own."""
    model = make_model(family, recipe, attention_dtype="fp8")
    assert gap_of_a_run(model, batch, num_updates=int(batch > 1)) == 0.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"attention_dtype": "fp8"}, {"attention_dtype": "bf16"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "bf16"}),
    ],
)
def test_other_numerics_on_one_side_are_not_exact(one: dict[str, str], other: dict[str, str]) -> None:
    """A control: one side attends or keeps its cache in FP8, the other does not."""
    model = make_model(**one)  # type: ignore[arg-type]
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=8, logprobs=0, ignore_eos=True)
    outputs = LLM(model).generate(random_prompts(4), params)
    assert max_gap(outputs, trainer_logprobs(model, outputs, TEMPERATURE)) == 0.0
    trainer = make_model(**other)  # type: ignore[arg-type]
    assert 1e-4 < max_gap(outputs, trainer_logprobs(trainer, outputs, TEMPERATURE)) < 5.0


def test_scales_shared_between_tokens_are_not_exact() -> None:
    """The negative control: the same run must fail where exactness is not to be had."""
    gap = gap_of_a_run(make_model(recipe="tensorwise", exact=False), batch=6, num_updates=0)
    assert 1e-4 < gap < 5.0


@pytest.mark.parametrize(
    ("family", "recipe", "batch"),
    # every family with every recipe at 16; any two of family, recipe and batch meet at the small ones, and in CI any
    # recipe and batch, and every family
    [
        *(pytest.param(f, r, 16, marks=pytest.mark.largest) for f in FAMILIES for r in RECIPES),
        *(
            pytest.param(f, RECIPES[(i + j) % 2], b, marks=pytest.mark.slow if i // 2 % 2 == j else pytest.mark.largest)
            for i, f in enumerate(FAMILIES)
            for j, b in enumerate((1, 4))
        ),
        pytest.param("qwen3", "blockwise", 64, marks=pytest.mark.slow(first=True)),
        pytest.param("llama", "rowwise", 64, marks=pytest.mark.largest),
    ],
)
def test_exact_at_every_batch(family: str, recipe: str, batch: int) -> None:
    model = make_model(family, recipe, seed=batch)
    caching = (True, False) if 1 < batch < 64 else (True,)  # one alone has no preemption; the largest takes long
    num_updates = 0 if (family, batch) == ("qwen3", 64) else 1  # the one of CI; new weights meet the smaller ones there
    assert gap_of_a_run(model, batch, num_updates, num_pages=3, caching=caching) == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("has_kernel", [False, True], ids=["reference", "kernel"])
def test_fp8_attention_is_exact_on_the_gpu(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference waits for the host, so that it serves without graphs."""
    if not has_kernel:
        monkeypatch.setattr(attention, "_has_kernel", lambda q: False)
    assert gap_of_a_run(make_model(device=torch.device("cuda"), attention_dtype="fp8"), batch=6) == 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_exact_on_the_gpu(family: str, recipe: str) -> None:
    assert gap_of_a_run(make_model(family, recipe, device=torch.device("cuda")), batch=16) == 0.0


def test_a_watched_norm_is_called_and_changes_no_bit() -> None:
    """The fused path from a projection to the cache would pass a hooked module by."""
    model = make_model("qwen3", "blockwise")
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=0)
    plain = LLM(model).generate([[1, 2, 3]], params)[0].outputs
    seen: list[torch.Size] = []
    norm = model.layers[0].self_attn.k_norm
    norm.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    plan_fusion(model)
    assert LLM(model).generate([[1, 2, 3]], params)[0].outputs == plain
    assert seen
