"""The engine under known KV scales: a layer that leaves FP8 while a sequence runs, the pages left, the prefixes."""

import pytest
import torch

from octavo.models import Decoder, ModelConfig, sequence_logprobs
from octavo.numerics import Numerics, get_recipe
from octavo.ops.attention import KVScaleTable
from octavo.serve import LLM, SamplingParams
from octavo.serve.engine.kv_cache import page_bytes
from tests.serve.random_models import make_model, random_prompts, sampler_logprobs

CONFIG = ModelConfig("qwen3", 64, 32, 64, 2, 2, 1, 16, max_position_embeddings=256)
PARAMS = SamplingParams(max_tokens=80, temperature=1.0, logprobs=0, seed=1, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    model = Decoder(CONFIG)
    model.set_numerics(Numerics(get_recipe("blockwise"), "fp8", True, kv_scales="trainer"))
    scale = torch.tensor(0.01)
    table_of(model).set({0: (scale, scale), 1: (scale, scale)}, model.weight_version)
    return LLM(model, num_kv_pages=8)


def table_of(model: Decoder) -> KVScaleTable:
    assert model.kv_table is not None
    return model.kv_table


def scored(llm: LLM, prompt: list[int], tokens: list[int]) -> list[float]:
    return sequence_logprobs(llm.model, [prompt + tokens])[0][len(prompt) - 1 :].tolist()


def test_a_layer_leaves_fp8_while_a_sequence_runs(llm: LLM) -> None:
    engine, prompt = llm.engine, [1, 2, 3]
    assert page_bytes(llm.model) == 2 * 64 * 2 * (16 + 4)
    request = engine.add_request(prompt, PARAMS)
    for _ in range(70):
        engine.step()
    table_of(llm.model).fall_back(1)
    engine.reallocate_kv_cache()
    num_before = request.num_output_tokens
    assert page_bytes(llm.model) == 2 * 64 * (16 + 4 + 32)
    assert engine.stats.num_kv_pages == 8 * 40 // 52  # as many as the same bytes hold
    assert [layer.is_fp8 for layer in engine.model_runner.layers] == [True, False]
    while engine.has_unfinished:
        engine.step()
    engine.check_integrity()
    output = engine.make_output(request)
    (found,), answer = sampler_logprobs(output), output.outputs[0]
    assert len(found) == 80
    # the trainer's context has the same layer in high precision, and every key was computed again
    assert found[num_before:] == scored(llm, prompt, answer.token_ids)[num_before:]


def test_new_scales_make_old_pages_unfindable(llm: LLM) -> None:
    prompt = list(range(1, 64)) * 2
    params = SamplingParams(max_tokens=2, temperature=1.0, logprobs=0, seed=1)
    for _ in range(2):
        llm.generate([prompt], params)
    hits = llm.stats.num_prefix_hit_tokens
    assert hits > 0
    scale = torch.tensor(0.02)
    table_of(llm.model).set({0: (scale, scale), 1: (scale, scale)}, llm.model.weight_version)
    (output,) = llm.generate([prompt], params)
    assert llm.stats.num_prefix_hit_tokens == hits
    assert sampler_logprobs(output) == [scored(llm, prompt, output.outputs[0].token_ids)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["engine", "trainer"])
def test_every_version_is_exact_under_scales_of_its_own(kind: str, device: str) -> None:
    """On a GPU the decode graphs of the first version are replayed under the scales of the next ones."""
    model = make_model("qwen3", "blockwise", device=device, vocab_size=128, intermediate_size=384, head_dim=64)
    model.set_numerics(Numerics(get_recipe("blockwise"), "fp8", True, kv_scales=kind))
    llm = LLM(model, num_kv_pages=24, max_num_seqs=4)
    prompts, params = random_prompts(3, seed=2), SamplingParams(max_tokens=6, logprobs=0, seed=3, ignore_eos=True)
    graphs, seen = llm.engine.model_runner.graphs, []
    for version in range(3):
        if kind == "trainer":
            scale = torch.tensor(0.02 * (version + 1))
            table_of(model).set(dict.fromkeys(range(2), (scale, 2 * scale)), model.weight_version)
        for output in llm.generate(prompts, params):
            expected = scored(llm, output.prompt_token_ids, output.outputs[0].token_ids)
            assert sampler_logprobs(output) == [expected]
        seen.append(table_of(model).scale.tolist())
        with torch.no_grad():
            model.layers[0].self_attn.qkv_proj.weight.mul_(1.5)
        model.mark_weights_updated()
    assert seen[0] != seen[1] != seen[2]
    if device == "cuda":
        assert graphs is not None and not graphs.is_empty and graphs.obstacle is None
