"""Weight updates: good ones have the bits of a fresh load at the old addresses, bad ones leave the old bits."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams, load_model, save_model
from octavo.errors import BackendError, CheckpointError, LostWeightsError, RequestError
from octavo.models import Decoder
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.nn import Linear, live_tensors
from octavo.weights import exchange
from octavo.weights.disk import stage_checkpoint
from octavo.weights.manifest import TensorSpec, tensor_sha256
from octavo.weights.update import WeightUpdate
from tests.serve.random_models import make_model

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=6, seed=1, logprobs=2, ignore_eos=True)
Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"


def make_llm(model: Decoder, **limits: object) -> LLM:
    return LLM(model, **{"num_kv_pages": 16, "max_num_seqs": 8, **limits})  # type: ignore[arg-type]


def bits(llm: LLM, prompt: list[int] = PROMPT) -> object:
    """Tokens and logprobs of an answer."""
    (output,) = llm.generate([prompt], PARAMS)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


def addresses(model: Decoder) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in live_tensors(model).items()}


def contents(model: Decoder) -> dict[str, bytes]:
    flat = {name: t.detach().contiguous().reshape(-1) for name, t in live_tensors(model).items()}
    return {name: t.view(torch.uint8).numpy().tobytes() for name, t in flat.items()}


def tensors_of(path: Path) -> Tensors:
    reader = SafetensorsReader(path)
    return {name: reader.load(name) for name in reader.entries}


def save(path: Path, dialect: str = "bf16", seed: int = 1, recipe: str = "bf16", family: str = "llama") -> Path:
    """A checkpoint of a random model, with a known input scale a linear."""
    model = make_model(family, recipe, exact=False, seed=seed)
    for i, module in enumerate(m for m in model.modules() if isinstance(m, Linear)):
        module.set_input_scale(torch.tensor([0.01 * (1 + i % 7 + seed)]))
    save_model(model, path, dialect)
    return path


@pytest.fixture
def serving() -> LLM:
    return make_llm(make_model("llama", "rowwise"))


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    return tensors_of(save(tmp_path_factory.mktemp("new") / "bf16"))


# the fast lane has a recipe with blocks and one with a scale a tensor, over a weight and over codes alone
SLOW = pytest.mark.slow
RECIPES = ["tensorwise", *(pytest.param(r, marks=SLOW) for r in ("bf16", "delayed", "rowwise", "blockwise"))]
RECIPES += [pytest.param(r, marks=SLOW) for r in ("mxfp8", "nvfp4")]
DIALECTS = ["compressed-tensors-channel", "fp8-tensor-dynamic", "fp8-tensor-static", "compressed-tensors-block"]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=SLOW)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_of_a_high_precision_model_is_a_fresh_load(recipe: str, family: str, tmp_path: Path) -> None:
    if family == "qwen3_moe" and recipe in ("mxfp8", "nvfp4"):
        pytest.skip("experts do not run under emulated recipes")
    path = save(tmp_path / "new", recipe=recipe, family=family)
    llm = make_llm(make_model(family, recipe, exact=False))
    before, old = addresses(llm.model), bits(llm)
    assert llm.update_weights(path) == llm.model.weight_version == 2
    fresh = load_model(path, recipe=recipe, kv_cache_dtype="fp8")
    assert bits(llm) == bits(make_llm(fresh)) != old
    assert addresses(llm.model) == before
    assert contents(llm.model) == contents(fresh)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=SLOW)])
@pytest.mark.parametrize("dialect", ["fp8-block", *(pytest.param(d, marks=SLOW) for d in DIALECTS)])
@pytest.mark.parametrize("source", ["path", "tensors"])
def test_an_update_of_a_model_of_codes_is_a_fresh_load(dialect: str, source: str, family: str, tmp_path: Path) -> None:
    if family == "qwen3_moe" and dialect in ("fp8-block", "compressed-tensors-block"):
        pytest.skip("its experts are no multiples of a block, and stay in high precision")
    old, new = (save(tmp_path / name, dialect, seed, family=family) for name, seed in (("old", 0), ("new", 1)))
    llm = make_llm(load_model(old, recipe="auto"))
    assert any(isinstance(m, Linear) and m.weight is None for m in llm.model.modules())
    before, old_bits = addresses(llm.model), bits(llm)
    fresh = load_model(new, recipe="auto")
    if dialect == "fp8-tensor-dynamic" and source == "tensors":  # held with a scale a row
        with pytest.raises(CheckpointError, match=r"weight_scale has shape \(\)"):
            llm.update_weights(tensors_of(new))
        assert bits(llm) == old_bits
        return
    llm.update_weights(new if source == "path" else tensors_of(new))
    assert bits(llm) == bits(make_llm(fresh)) != old_bits
    assert addresses(llm.model) == before
    assert contents(llm.model) == contents(fresh)


@pytest.mark.parametrize("recipe", ["tensorwise", *(pytest.param(r, marks=SLOW) for r in ("rowwise", "blockwise"))])
def test_codes_are_made_of_high_precision_tensors(recipe: str, new_weights: Tensors) -> None:
    """A model that gave up its weights is updated from bf16; codes and scales are those that it would have made."""
    llm, fresh = make_llm(_codes_only(recipe, seed=0)), _codes_only(recipe, seed=1)
    llm.update_weights({name: tensor.float() for name, tensor in new_weights.items()})
    assert bits(llm) == bits(make_llm(fresh))
    assert contents(llm.model) == contents(fresh)


def _codes_only(recipe: str, seed: int) -> Decoder:
    model = make_model("llama", recipe, exact=False, seed=seed)
    for module in model.modules():
        if isinstance(module, Linear) and module.recipe is not None:
            module.keep_codes_only()
    return copy.deepcopy(model)  # a copy's parts are views of its whole, too


def _drop(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if name != DOWN}


def _set(value: Callable[[torch.Tensor], torch.Tensor], name: str = DOWN) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: value(tensors[DOWN].clone())}


def _poison(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3, 5] = value
        return tensor

    return change


BAD: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (_drop, "missing tensors: model.layers.1.mlp.down_proj.weight"),
    "extra": (_set(lambda t: t, "model.layers.7.mlp.down_proj.weight"), "is no tensor of this model"),
    "misnamed": (lambda ts: {n.replace("down_proj", "dwn_proj"): t for n, t in ts.items()}, "is no tensor of this"),
    "shape": (_set(lambda t: t[:, :-1]), r"has shape \(128, 343\), but the model's is \(128, 344\)"),
    "transposed": (_set(lambda t: t.t()), "has shape"),
    "dtype": (_set(lambda t: t.to(torch.float64)), "is torch.float64; the model holds it in high precision"),
    "codes": (_set(lambda t: t.to(torch.float8_e4m3fn)), "the model holds it in high precision"),
    "a scale without codes": (_set(lambda t: t[:, :1], DOWN + "_scale"), "is no tensor of this model"),
    "nan": (_set(_poison(float("nan"))), "holds 1 NaN or infinite values"),
    "inf": (_set(_poison(float("-inf"))), "holds 1 NaN or infinite values"),
    "too large for bf16": (_set(lambda t: t.float().fill_(3.4e38)), "NaN or infinite values"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_leaves_the_old_weights(name: str, serving: LLM, new_weights: Tensors) -> None:
    change, message = BAD[name]
    before, old, version = contents(serving.model), bits(serving), serving.model.weight_version
    with pytest.raises(CheckpointError, match=message):
        serving.update_weights(change(new_weights))
    assert contents(serving.model) == before
    assert serving.model.weight_version == serving.engine.weight_version == version
    assert bits(serving) == old


BAD_CODES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str]] = {
    "no scale": ("weight_scale", None, "missing tensors: .*q_proj.weight_scale"),
    "a zero scale": ("weight_scale", lambda s: s * 0, "zero or negative"),
    "a nan scale": ("weight_scale", lambda s: s * float("nan"), "NaN or infinite"),
    "another shape of scale": ("weight_scale", lambda s: s[:-1], "q_proj.weight_scale has shape"),
    "a nan code": ("weight", lambda w: w.view(torch.uint8).fill_(0x7F).view(w.dtype), "NaN or infinite"),
    "other codes": ("weight", lambda w: w.float().to(torch.float8_e5m2), "is torch.float8_e5m2; the model holds"),
}


@pytest.mark.parametrize("name", BAD_CODES)
def test_bad_codes_leave_the_old_weights(name: str, tmp_path: Path) -> None:
    suffix, change, message = BAD_CODES[name]
    dialect = "compressed-tensors-channel"
    llm = make_llm(load_model(save(tmp_path / "old", dialect, seed=0), recipe="auto"))
    tensors = tensors_of(save(tmp_path / "new", dialect))
    before, old = contents(llm.model), bits(llm)
    bad = f"model.layers.0.self_attn.q_proj.{suffix}"
    tensor = tensors.pop(bad)
    with pytest.raises(CheckpointError, match=message):
        llm.update_weights(tensors if change is None else {**tensors, bad: change(tensor)})
    assert (contents(llm.model), bits(llm)) == (before, old)


def test_messages_name_the_tensors_that_were_sent(tmp_path: Path) -> None:
    dialect = "compressed-tensors-channel"
    llm = make_llm(load_model(save(tmp_path / "old", dialect, seed=0), recipe="auto"))
    tensors = tensors_of(save(tmp_path / "new", dialect))
    values = tensors_of(save(tmp_path / "values"))
    attention = "model.layers.0.self_attn"
    mixed = {name: t for name, t in tensors.items() if name != f"{attention}.q_proj.weight_scale"}
    mixed[f"{attention}.q_proj.weight"] = values[f"{attention}.q_proj.weight"]
    with pytest.raises(CheckpointError) as caught:
        llm.update_weights(mixed)
    assert f"{attention}.k_proj.weight, {attention}.v_proj.weight came as codes" in str(caught.value)
    assert f"{attention}.q_proj.weight in high precision" in str(caught.value)
    static = make_llm(load_model(save(tmp_path / "static", "fp8-tensor-static"), recipe="auto"))
    with pytest.raises(CheckpointError) as caught:
        static.update_weights(
            dict(sorted(values.items(), key=lambda pair: "o_proj" in pair[0] or "self_attn" not in pair[0]))
        )
    assert f"{attention}.q_proj.weight, {attention}.k_proj.weight, {attention}.v_proj.weight: the" in str(caught.value)
    assert "qkv_proj" not in str(caught.value)


def test_an_llm_of_a_path_holds_codes_alone_and_takes_both_kinds(tmp_path: Path) -> None:
    path, values = save(tmp_path / "m"), save(tmp_path / "new")
    llm = LLM(path, quantization="fp8", num_kv_pages=16, max_num_seqs=8, device="cpu")
    assert all(m.weight is None for n, m in llm.model.named_modules() if isinstance(m, Linear) and n != "lm_head")
    llm.update_weights(values)
    fresh = LLM(values, quantization="fp8", num_kv_pages=16, max_num_seqs=8, device="cpu")
    assert contents(llm.model) == contents(fresh.model)


def test_checksums(serving: LLM, new_weights: Tensors, tmp_path: Path) -> None:
    old = bits(serving)
    sums = {name: tensor_sha256(tensor) for name, tensor in new_weights.items()}
    flipped = new_weights[DOWN].clone()
    flipped.view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(CheckpointError, match="SHA-256; they were damaged"):
        serving.update_weights({**new_weights, DOWN: flipped}, checksums=sums)
    with pytest.raises(CheckpointError, match="no more and no less"):
        serving.update_weights(new_weights, checksums={DOWN: sums[DOWN]})
    path = save(tmp_path / "x")
    with pytest.raises(CheckpointError, match="SHA-256"):
        serving.update_weights(path, checksums={**sums, DOWN: "0" * 64})
    with pytest.raises(RequestError, match="not with an iterable"):
        serving.update_weights(iter(new_weights.items()), checksums=sums)
    assert bits(serving) == old
    serving.update_weights(path, checksums=sums)
    serving.update_weights(new_weights, checksums=sums)
    serving.update_weights(iter(new_weights.items()))
    assert serving.model.weight_version == 4


def test_damaged_and_foreign_checkpoints(serving: LLM, tmp_path: Path) -> None:
    old, path = bits(serving), save(tmp_path / "x")
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        serving.update_weights(path)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"qk_norm|family|tie_word_embeddings"):
        serving.update_weights(save(tmp_path / "other", family="qwen3"))
    assert bits(serving) == old


@pytest.mark.parametrize("fails_at", [0, 7, *(pytest.param(at, marks=SLOW) for at in (1, 2, 30))])
@pytest.mark.parametrize("midway", [False, True])
def test_a_failure_in_the_middle_is_undone(
    fails_at: int, midway: bool, serving: LLM, new_weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, old, places = contents(serving.model), bits(serving), addresses(serving.model)
    num_copies = 0

    def copy_some(target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal num_copies
        num_copies += 1
        if num_copies <= fails_at:
            target.copy_(source)
            return
        if midway:
            target[:1].copy_(source[:1])
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "EXCHANGE_BYTES", 10_000)  # larger tensors go in several pieces
        patch.setattr(exchange, "copy_piece", copy_some)
        with pytest.raises(BackendError, match=r"out of luck.*the old weights are back"):
            serving.update_weights(new_weights)
    assert (contents(serving.model), addresses(serving.model)) == (before, places)
    assert (serving.model.weight_version, bits(serving)) == (1, old)
    assert serving.update_weights(new_weights) == 2
    assert bits(serving) == bits(make_llm(make_model("llama", "rowwise", seed=1)))


def test_what_cannot_be_undone_is_said(serving: LLM, new_weights: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(exchange, "_wait_for", fail)
    with pytest.raises(LostWeightsError, match="load the model again"):
        serving.update_weights(new_weights)


def test_a_rank_that_lost_its_weights_says_so_whatever_an_earlier_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        """Of a rank 0 whose copies failed too, and were undone."""

        def together(self, work: Callable[[], None]) -> None:
            try:
                work()
            except LostWeightsError as own:
                raise BackendError("rank 0: no memory") from own

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(exchange, "_wait_for", fail)
    group: Any = Group()
    with pytest.raises(LostWeightsError, match="could not be brought back"):
        exchange.exchange_on_all(group, [(torch.zeros(2), torch.ones(2))])


def test_a_staging_that_fails_keeps_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = make_model("llama", "rowwise"), list[WeightUpdate]()

    def begin(**given: Any) -> WeightUpdate:
        made.append(WeightUpdate(model, **given))
        return made[-1]

    def fail(*_: object) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(SafetensorsReader, "load", fail)
    with pytest.raises(OSError, match="no such disk"):
        stage_checkpoint(model, save(tmp_path / "x"), begin=begin)
    assert made[0].ended == "it failed: no such disk"


def test_an_unknown_policy_is_refused_before_anything_is_staged(serving: LLM) -> None:
    def unread() -> Any:
        raise AssertionError("a tensor was asked for")
        yield

    with pytest.raises(RequestError, match="running must be one of abort, wait, keep, got 'later'"):
        serving.update_weights(unread(), running="later")  # type: ignore[arg-type]


def test_no_page_of_older_weights_is_used_again(serving: LLM, new_weights: Tensors) -> None:
    prompt = PROMPT * 40  # two pages and a half
    bits(serving, prompt)
    hits = serving.stats.num_prefix_hit_tokens
    bits(serving, prompt)
    assert serving.stats.num_prefix_hit_tokens == hits + 128
    with pytest.raises(CheckpointError):
        serving.update_weights({})
    bits(serving, prompt)
    assert serving.stats.num_prefix_hit_tokens == hits + 256  # the cache is the old weights' and stays
    serving.update_weights(new_weights)
    new = bits(serving, prompt)
    assert serving.stats.num_prefix_hit_tokens == hits + 256
    assert new == bits(make_llm(make_model("llama", "rowwise", seed=1)), prompt)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_running_requests_under_each_policy(is_ahead: bool, new_weights: Tensors) -> None:
    def start() -> tuple[LLM, list, list]:  # type: ignore[type-arg]
        llm = make_llm(make_model("llama", "rowwise"), async_scheduling=is_ahead, num_kv_pages=6, max_num_seqs=3)
        params = SamplingParams(max_tokens=12, seed=3, logprobs=0, ignore_eos=True, prompt_logprobs=0)
        requests = [llm.engine.add_request([9, i, *PROMPT] * 12, params) for i in range(4)]  # one of them waits
        while any(r.num_output_tokens < 5 for r in requests[:3]):
            llm.engine.step()
        return llm, requests, [list(r.sequences[0].token_ids) for r in requests]

    def versions(requests: list) -> list[list[int]]:  # type: ignore[type-arg]
        return [request.sequences[0].weight_versions for request in requests]

    llm, requests, _ = start()
    llm.update_weights(new_weights, running="abort")
    assert [r.sequences[0].finish_reason for r in requests] == ["abort"] * 4
    assert all(set(v) <= {1} for v in versions(requests))

    llm, requests, _ = start()
    update = WeightUpdate(llm.model)
    for name, tensor in new_weights.items():
        update.stage(name, tensor)
    with pytest.raises(RequestError, match="sequences are unfinished"):
        llm.engine.commit_update(update)
    assert update.ended is None
    llm.update_weights(new_weights, running="wait")
    assert versions(requests) == [[1] * 12] * 4

    llm, requests, early = start()
    llm.update_weights(new_weights, running="keep")
    llm.engine.check_integrity()
    while llm.engine.has_unfinished:
        llm.engine.step()
    fresh = make_llm(make_model("llama", "rowwise", seed=1))
    for request, tokens in zip(requests, early, strict=True):
        (seq,) = request.sequences
        assert seq.token_ids[: len(tokens)] == tokens
        assert len(seq.weight_versions) == 12 and seq.weight_versions == sorted(seq.weight_versions)
        num_old = seq.weight_versions.count(1)
        assert num_old >= len(tokens) - seq.prompt_len
        # the rest has the bits of new weights over all that went before
        params = SamplingParams(max_tokens=1, seed=3, prompt_logprobs=0, ignore_eos=True)
        (scored,) = fresh.generate([seq.token_ids[:-1]], params)
        assert scored.prompt_logprobs is not None
        for position in range(seq.prompt_len + num_old, len(seq.token_ids) - 1):
            held = seq.logprobs[position - seq.prompt_len]
            assert held == scored.prompt_logprobs[position]
    assert {1, 2} == {v for vs in versions(requests) for v in vs}
    llm.generate([[9, 3, *PROMPT] * 12], PARAMS)
    assert llm.stats.num_prefix_hit_tokens == 64  # the page that was computed again is the new weights'


def test_a_prompt_that_is_being_scored_is_scored_anew(new_weights: Tensors) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    llm = make_llm(make_model("llama", "rowwise"), max_num_batched_tokens=16, max_num_seqs=2)
    request = llm.engine.add_request(PROMPT * 10, params)
    llm.engine.step()
    assert len(request.sequences[0].prompt_logprobs) == 16
    llm.update_weights(new_weights, running="keep")
    while llm.engine.has_unfinished:
        llm.engine.step()
    (scored,) = make_llm(make_model("llama", "rowwise", seed=1)).generate([PROMPT * 10], params)
    assert request.prompt_logprobs == scored.prompt_logprobs


def test_partial_updates_are_by_name_and_of_whole_parameters(serving: LLM, new_weights: Tensors) -> None:
    mlp = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(CheckpointError, match="missing tensors"):
        serving.update_weights({mlp: new_weights[mlp]})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight"):  # fused with it
        serving.update_weights({mlp: new_weights[mlp]}, partial=[mlp])
    with pytest.raises(CheckpointError, match="names no tensor of this model"):
        serving.update_weights({}, partial=["model.layers.9.*"])
    with pytest.raises(CheckpointError, match="is no tensor of this model's, or of this update's part"):
        serving.update_weights(new_weights, partial=[mlp])
    layer = {n: t for n, t in new_weights.items() if n.startswith("model.layers.0.")}
    before = addresses(serving.model)
    serving.update_weights(layer, partial=["model.layers.0.*"])
    expected, state = make_model("llama", "rowwise"), make_model("llama", "rowwise", seed=1).state_dict()
    expected.load_state_dict({n: t for n, t in state.items() if n.startswith("layers.0.")}, strict=False)
    assert bits(serving) == bits(make_llm(expected))
    assert addresses(serving.model) == before
    assert serving.update_weights({DOWN: new_weights[DOWN]}, partial=DOWN) == 3


def test_a_partial_update_of_weights_that_changed_meanwhile(serving: LLM, new_weights: Tensors) -> None:
    update = WeightUpdate(serving.model, partial=[DOWN])
    update.stage(DOWN, new_weights[DOWN])
    serving.update_weights(new_weights)
    with pytest.raises(CheckpointError, match="changed from version 1 to 2"):
        serving.engine.commit_update(update)


def test_a_transaction_by_hand(serving: LLM, new_weights: Tensors) -> None:
    old = bits(serving)
    manifest = {n: TensorSpec(t.dtype, tuple(t.shape), tensor_sha256(t)) for n, t in new_weights.items()}
    with pytest.raises(CheckpointError, match="missing tensors"):
        WeightUpdate(serving.model, manifest={DOWN: manifest[DOWN]})
    with pytest.raises(CheckpointError, match="has shape"):
        WeightUpdate(serving.model, manifest={**manifest, DOWN: TensorSpec(torch.bfloat16, (1, 1))})
    update = WeightUpdate(serving.model, manifest=manifest)
    update.stage(DOWN, new_weights[DOWN])
    with pytest.raises(CheckpointError, match="came twice"):
        update.stage(DOWN, new_weights[DOWN])
    assert update.ended is not None and "came twice" in update.ended
    with pytest.raises(RequestError, match="takes nothing more: it failed"):
        serving.engine.commit_update(update)
    update = WeightUpdate(serving.model, manifest=manifest)
    with pytest.raises(CheckpointError, match="have not come"):
        serving.engine.commit_update(update)
    update = WeightUpdate(serving.model, manifest=manifest)
    update.end()
    with pytest.raises(RequestError, match="it was aborted"):
        update.stage(DOWN, new_weights[DOWN])
    with pytest.raises(RequestError, match="another model"):
        make_llm(make_model("llama", "rowwise")).engine.commit_update(update)
    assert bits(serving) == old


def test_a_second_commit_brings_the_old_weights_back(serving: LLM, new_weights: Tensors) -> None:
    old, began = bits(serving), serving.engine.weight_version
    update = serving.engine.begin_update()
    for name, tensor in new_weights.items():
        update.stage(name, tensor)
    update.keep_old()
    assert serving.engine.commit_update(update) == began + 1
    assert update.ended is None and bits(serving) != old
    assert serving.engine.commit_update(update) == began + 2
    assert bits(serving) == old
    with pytest.raises(RequestError, match="its old weights are back"):
        serving.engine.commit_update(update)


def test_tensors_may_be_reused_by_their_sender(serving: LLM, new_weights: Tensors) -> None:
    """Also those that wait for the rest of their parameter; and its own weights are not written into."""
    kept = {name: tensor.clone() for name, tensor in new_weights.items()}
    update = WeightUpdate(serving.model)
    for name, tensor in new_weights.items():
        buffer = tensor.clone()
        update.stage(name, buffer)
        buffer.fill_(7.0)
    serving.engine.commit_update(update)
    assert bits(serving) == bits(make_llm(make_model("llama", "rowwise", seed=1)))
    serving.update_weights(new_weights)
    assert all(torch.equal(kept[name], tensor) for name, tensor in new_weights.items())


def test_staging_holds_the_weights_once(serving: LLM, new_weights: Tensors) -> None:
    """And beside them no more than the tensors of one parameter, in the order of the files."""
    update = WeightUpdate(serving.model)
    staging = update._staging
    assert staging is not None
    waiting = []
    for name in sorted(new_weights, key=staging.position):
        update.stage(name, new_weights[name])
        waiting.append(sum(t.nbytes for t in staging._arrived._held.values()))
    update.verify()
    live = {n: t for n, t in live_tensors(serving.model).items() if not n.endswith(("rope.cos", "rope.sin"))}
    assert {n: t.nbytes for n, t in staging._tensors.items()} == {n: t.nbytes for n, t in live.items()}
    assert waiting[-1] == 0
    assert 0 < max(waiting) < max(p.nbytes for p in serving.model.parameters())
    update.end()


def test_asleep_and_kv_scales(serving: LLM, new_weights: Tensors) -> None:
    serving.engine.sleep()
    serving.update_weights(new_weights)
    serving.engine.wake()
    assert bits(serving) == bits(make_llm(make_model("llama", "rowwise", seed=1)))
    scales = {f"model.layers.{i}.self_attn.{r}_scale": torch.tensor(0.5 + i) for i in range(2) for r in "kv"}
    serving.update_weights({**new_weights, **scales})
    assert [s.k_scale.item() for s in serving.model.kv_scales if s.k_scale is not None] == [0.5, 1.5]
    scales.pop("model.layers.1.self_attn.v_scale")
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.v_scale"):
        serving.update_weights({**new_weights, **scales})


def test_delayed_scaling_wants_its_state(tmp_path: Path, new_weights: Tensors) -> None:
    llm = make_llm(make_model("llama", "delayed", exact=False))
    with pytest.raises(CheckpointError, match="fp8_amax_history"):
        llm.update_weights(new_weights)


def test_codes_of_a_trained_model_stay_where_they_are(serving: LLM) -> None:
    """A refit of a shared model, too, writes the new codes over the old ones."""
    before = addresses(serving.model)
    with torch.no_grad():
        for parameter in serving.model.parameters():
            parameter.mul_(1.25)
    serving.model.mark_weights_updated()
    assert serving.refit() == 2
    bits(serving)
    assert addresses(serving.model) == before
    again = load_model(serving.model.config, recipe="rowwise", kv_cache_dtype="fp8", exact=True)
    again.load_state_dict(serving.model.state_dict())
    assert bits(serving) == bits(make_llm(again))


@pytest.mark.parametrize("weights", [{"a": [1.0]}, [1], [("a", 2)]], ids=["list", "number", "pair"])
def test_what_is_no_tensor_is_refused(serving: LLM, weights: object) -> None:
    old = bits(serving)
    with pytest.raises(RequestError, match="names with torch tensors"):
        serving.update_weights(weights)  # type: ignore[arg-type]
    assert bits(serving) == old
