"""Per-tensor KV scales with our own server: sent with the weights or made there, stamped, the same on both sides."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

pytest.importorskip("uvicorn")

from octavo.cli.serve import Asked, command
from octavo.errors import ConfigError, RecipeError, StaleScaleError
from octavo.integrations.rollout import octavo_server as engine_module
from octavo.integrations.rollout.octavo_server import OctavoServerEngine
from octavo.numerics import Numerics, get_recipe
from octavo.rl import loop
from octavo.rl.config import RLConfig
from octavo.rl.engines import EngineAnswerError, EngineError, EngineSection, StaleVersionError, WeightAuditError
from octavo.rl.engines.build import check_engine
from octavo.rl.loop import build_policy
from octavo.rl.progress import RLProgress
from octavo.rl.refit import refit
from octavo.rl.trainer import Trainer
from octavo.serve import SamplingParams
from octavo.serve.engine import Engine, EngineConfig
from octavo.weights.kv_scales import server as kv_scales
from octavo.weights.kv_scales.server import ServerKVScales
from octavo.weights.wire import buckets, read_tensor, tensor_json
from tests.integrations.rollout.conftest import PROMPTS, SPEC, block_config
from tests.integrations.rollout.test_octavo_server import KEY, Pair, make_engine
from tests.rl.conftest import Policy, nudge
from tests.rl.test_loop import EASY
from tests.serve.http.running import Running, running

ADMIN = {"Authorization": f"Bearer {KEY}"}
MARGIN = 1.05
NEVER = {"kv_fallback_clip_share": 0.0, "kv_fallback_flush_share": 0.0}


def asked(path: Path, kind: str, margin: float = MARGIN) -> Asked:
    """What `octavo serve PATH --quantization blockwise --kv-cache-dtype fp8 --exact --kv-scales KIND` asks for."""
    how: dict[str, Any] = {
        "quantization": "blockwise",
        "kv_cache_dtype": "fp8",
        "attention_dtype": "auto",
        "exact": True,
        "device": "cpu",
    }
    how["kv_scales"] = kind
    return Asked(path, None, how, EngineConfig(max_num_seqs=16, num_kv_pages=40), kv_scale_margin=margin)


class ScaledPair(Pair):
    def set_scales(self, k: float, v: float) -> None:
        assert self.model.kv_table is not None
        self.model.kv_table.set({0: (torch.tensor(k), torch.tensor(v))}, self.model.weight_version)


@contextmanager
def paired(start: Path, policy: Policy, kind: str, margin: float = MARGIN) -> Iterator[ScaledPair]:
    model, tokenizer = policy
    model.set_numerics(Numerics(get_recipe("blockwise"), "fp8", exact=True, kv_scales=kind))
    assert model.kv_table is not None
    model.kv_table.margin = MARGIN
    with running(asked(start, kind, margin).build, admin_key=KEY) as server:
        yield ScaledPair(server, make_engine(server, model, tokenizer), model, tokenizer)


@pytest.fixture
def pair(start: Path, blocks: Policy) -> Iterator[ScaledPair]:
    with paired(start, blocks, "trainer") as it:
        yield it


def test_scales_go_with_the_weights_and_are_used(pair: ScaledPair) -> None:
    table = pair.model.kv_table
    assert table is not None
    for k, v in ((0.03, 0.01), (1e-4, 1e-4)):  # under the second nearly all is clipped
        nudge(pair.model)
        pair.set_scales(k, v)
        assert pair.refit() == pair.model.weight_version
        held = pair.server.engine.model.kv_table
        assert held is not None and torch.equal(held.scale, table.scale)
        assert held.versions == [pair.server.engine.weight_version]
        pair.sample_exactly()
        shares = table.take_shares(pair.model.config.num_kv_heads * pair.model.config.head_dim)[0]
        assert (min(shares.k_clipped, shares.v_clipped) > 0.5) == (k == 1e-4)
    under = pair.sample_exactly()
    pair.set_scales(0.03, 0.01)
    seen = pair.server.engine.weight_version
    with pytest.raises(StaleScaleError, match=r"layer 0 are \[.*\] there, and \[.*\] were handed over"):
        pair.engine.generate(PROMPTS, SPEC)
    pair.refit()
    assert pair.server.engine.weight_version == seen + 1
    assert pair.sample_exactly() != under


def test_missing_and_stale_scales_are_caught_before_anything_is_sent(pair: ScaledPair) -> None:
    held = pair.server.engine.weight_version
    with pytest.raises(StaleScaleError, match="KV scales of layer 0 were never set, so they would be 1 by omission"):
        pair.refit()
    pair.set_scales(0.03, 0.01)
    pair.refit()
    nudge(pair.model)
    now = pair.model.weight_version
    with pytest.raises(StaleScaleError, match=f"weight version {now - 1}, but the weights are version {now}: a stale"):
        pair.refit()
    assert pair.server.engine.weight_version == held + 1


def test_the_server_refuses_what_the_sender_did_not_see(pair: ScaledPair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.set_scales(0.03, 0.01)
    pair.refit()
    held = pair.server.engine.weight_version
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "scale_tensors", lambda *_: {})
        with pytest.raises(EngineError, match=r"model\.layers\.0\.self_attn\.k_scale: kv_scales='trainer' wants it"):
            pair.refit()
    admin = OctavoServerEngine.admin
    for stamp in (0, None):

        def spoil(engine: OctavoServerEngine, path: str, body: Any = None, stamp: int | None = stamp) -> Any:
            return admin(engine, path, {**body, "kv_scales_version": stamp} if "tensors" in (body or {}) else body)

        with monkeypatch.context() as patch:
            patch.setattr(OctavoServerEngine, "admin", spoil)
            with pytest.raises(EngineError, match=f"weight version {stamp}, but the weights are version .* stale KV"):
                pair.refit()
    assert pair.server.engine.weight_version == held
    pair.sample_exactly()


@pytest.mark.parametrize("from_end", [1, 8])
def test_a_damaged_scale_is_named(pair: ScaledPair, monkeypatch: pytest.MonkeyPatch, from_end: int) -> None:
    pair.set_scales(0.03, 0.01)
    pair.refit()
    held = pair.server.engine.weight_version

    def corrupt(tensors: dict[str, torch.Tensor], size: int) -> Iterator[bytes]:
        (whole,) = buckets(tensors, 1 << 30)
        raw = bytearray(whole)
        raw[-from_end] ^= 1
        yield bytes(raw)

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "buckets", corrupt)
        with pytest.raises(WeightAuditError, match="the server refused the upload") as caught:
            pair.refit()
    role = "v" if from_end == 1 else "k"
    assert (caught.value.fault, caught.value.tensor) == ("corrupted bytes", f"model.layers.0.self_attn.{role}_scale")
    assert pair.server.engine.weight_version == held
    pair.sample_exactly()


def test_a_server_without_its_scales_takes_no_requests(pair: ScaledPair) -> None:
    for stream in (False, True):
        answer = pair.server.post("/v1/completions", prompt="1+1=", stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stale_kv_scale")
        assert "layer 0 were never set" in answer.json()["error"]["message"]
    pair.set_scales(0.03, 0.01)
    pair.refit()
    assert pair.server.post("/v1/completions", prompt="1+1=").status_code == 200


def test_a_part_of_the_weights_would_leave_the_scales_behind(pair: ScaledPair, tmp_path: Path) -> None:
    fields = {"norm": {"dtype": "bfloat16", "shape": [128], "sha256": "0" * 64}}
    answer = pair.server.post("/admin/weight_update", ADMIN, tensors=fields, partial=["model.norm.weight"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_kv_scale")
    with running(lambda: pair.server.engine, admin_key=KEY, weights_dir=tmp_path) as other:
        (tmp_path / "model").mkdir()
        answer = other.post("/admin/update_weights", ADMIN, path="model", partial=["model.norm.weight"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_kv_scale")


@pytest.mark.parametrize("kind", ["engine", "_calibrated_once", "_fixed"])
def test_scales_of_the_servers_own_are_the_trainers_too(start: Path, blocks: Policy, kind: str) -> None:
    with paired(start, blocks, kind) as pair:
        ours, found, versions = pair.model.kv_table, [], []
        assert ours is not None
        for _ in range(3):
            pair.refit()
            pair.sample_exactly()
            first = ours.scale.clone()
            pair.sample_exactly()
            theirs = pair.server.engine.model.kv_table
            assert theirs is not None and torch.equal(ours.scale, theirs.scale)
            assert torch.equal(ours.scale, first)  # the second batch takes what the first one made
            assert torch.equal(ours.counts, theirs.counts) and ours.num_written == theirs.num_written > 0
            found.append(first)
            versions.append(ours.versions[0])
            nudge(pair.model)
        assert not ours.is_calibrating or kind == "_fixed"
        follows = kind == "engine"
        assert (not torch.equal(found[0], found[1])) == follows
        base = versions[0]
        assert base is not None
        assert versions == ([base, base + 1, base + 2] if follows else [base] * 3)
        state = pair.server.client.get("/admin/kv_scales", headers=ADMIN).json()
        assert state["source"] == kind and state["margin"] == MARGIN
        assert set(state["shares"]) == {"k_clipped", "v_clipped", "k_flushed", "v_flushed"}
        assert state["shares"]["k_flushed"][0] == state["counts"][0][0][1] / state["num_values"]


def test_scales_of_before_the_run_are_not_the_runs(start: Path, blocks: Policy) -> None:
    with paired(start, blocks, "_calibrated_once") as pair:
        pair.server.complete(prompt="1+1=")
        pair.refit()
        with pytest.raises(StaleScaleError, match=r"layer 0 were made for .* version \d+, .* restart the server"):
            pair.engine.generate(PROMPTS, SPEC)


def test_a_server_that_makes_its_scales_otherwise_is_refused(start: Path, blocks: Policy) -> None:
    with paired(start, blocks, "engine", margin=1.0) as pair:
        with pytest.raises(ConfigError, match=r"raises an amax by 1; start it with --kv-scale-margin 1\.05"):
            pair.refit()
        numerics = dataclasses.replace(pair.model.numerics, kv_scales="trainer")
        with pytest.raises(ConfigError, match=r"by 'engine'; start it with --kv-cache-dtype fp8 --kv-scales trainer"):
            check_engine(pair.engine.section, numerics)
        check_engine(pair.engine.section, pair.model.numerics)
        pair.model.set_numerics(numerics)
        with pytest.raises(ConfigError, match="--kv-scales trainer"):
            pair.refit()
        tensors = {"x": {"dtype": "bfloat16", "shape": [1], "sha256": "0" * 64}}
        answer = pair.server.post("/admin/weight_update", ADMIN, tensors=tensors, kv_scales_version=1)
        assert answer.status_code == 400 and "start it with --kv-scales trainer" in answer.json()["error"]["message"]


def test_layers_fall_back_on_both_sides(start: Path, blocks: Policy) -> None:
    with paired(start, blocks, "engine") as pair:
        pair.refit()
        in_fp8 = pair.sample_exactly()
        table = pair.model.kv_table
        assert table is not None
        table.fall_back(0)
        in_bf16 = pair.sample_exactly()
        theirs = pair.server.engine.model.kv_table
        assert theirs is not None and theirs.high_precision == {0}
        assert in_bf16 != in_fp8
        nudge(pair.model)
        pair.refit()
        pair.sample_exactly()
        table.high_precision.clear()  # a run that does not know of it
        pair.refit()
        assert table.high_precision == {0}
        pair.sample_exactly()
        bad = pair.server.post("/admin/kv_scales/fall_back", ADMIN, layers=[1])
        assert bad.status_code == 400 and "no layer 1, of 1" in bad.json()["error"]["message"]
        pair.server.assert_at_rest()


def test_no_layer_falls_back_under_a_request(start: Path, blocks: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    fall_back = kv_scales.fall_back

    def beside_a_request(engine: Engine, layers: Sequence[int]) -> dict[str, Any]:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
        try:
            return fall_back(engine, layers)
        finally:
            engine.abort_all()

    with paired(start, blocks, "_fixed") as pair:
        monkeypatch.setattr(kv_scales, "fall_back", beside_a_request)
        refused = pair.server.post("/admin/kv_scales/fall_back", ADMIN, layers=[0])
        monkeypatch.undo()
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "requests_running")
        held = pair.server.engine.model.kv_table
        assert held is not None and not held.high_precision
        pair.server.post("/admin/sleep", ADMIN)
        assert pair.server.post("/admin/kv_scales/fall_back", ADMIN, layers=[0]).status_code == 503
        pair.server.post("/admin/wake", ADMIN)


def test_somebody_elses_update_within_a_batch(pair: ScaledPair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.set_scales(0.03, 0.01)
    pair.refit()
    take_over = ServerKVScales.take_over

    def late(self: ServerKVScales, *args: Any) -> None:
        refit(pair.model, pair.model, make_engine(pair.server, pair.model, pair.tokenizer))
        take_over(self, *args)

    monkeypatch.setattr(ServerKVScales, "take_over", late)
    with pytest.raises(StaleVersionError, match="updated by another client"):
        pair.engine.generate(PROMPTS, SPEC)


def test_a_server_without_such_scales_says_so(start: Path, blocks: Policy) -> None:
    with running(asked(start, "per_token_head").build, admin_key=KEY) as server:
        answer = server.client.get("/admin/kv_scales", headers=ADMIN).json()
        assert answer == {"source": "per_token_head", "weight_version": server.engine.weight_version}
        assert server.client.get("/admin/kv_scales").status_code == 401
        answer = server.post("/admin/kv_scales/fall_back", ADMIN, layers=[0]).json()
        assert answer["error"]["code"] == "no_kv_scales"
    without = asked(start, "engine")
    without.how["kv_cache_dtype"] = "bf16"
    with pytest.raises(RecipeError, match="scales an FP8 cache"):
        without.check()


def test_the_options_reach_the_server(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Asked] = []
    monkeypatch.setattr("octavo.serve.http.run_server", lambda build, *_: seen.append(build.__self__) or 0)
    with pytest.raises(typer.Exit):
        command(start, kv_cache_dtype="fp8", kv_scales="engine", kv_scale_margin=1.25, device="cpu", num_kv_pages=8)
    assert (seen[0].how["kv_scales"], seen[0].kv_scale_margin) == ("engine", 1.25)
    table = seen[0].build().model.kv_table
    assert table is not None and (table.source, table.margin) == ("engine", 1.25)
    with pytest.raises(RecipeError, match="kv_scales must be one of"):
        command(start, kv_cache_dtype="fp8", kv_scales="token")


BAD = {
    "dtype": ({"dtype": "float64"}, "a tensor of 'float64'"),
    "shape": ({"shape": [-1]}, "a tensor of 'float32'"),
    "cut": ({"shape": [3, 2]}, "16 bytes came for float32"),
    "base64": ({"data": "?"}, "no tensor of dtype, shape and base64"),
    "damaged": ({"sha256": "0" * 64}, "damaged on the way"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_tensor_that_came_damaged(fault: str) -> None:
    fields = tensor_json(torch.arange(4.0).view(2, 2))
    assert torch.equal(read_tensor(fields, (torch.float32,), "x"), torch.arange(4.0).view(2, 2))
    changed, message = BAD[fault]
    with pytest.raises(EngineAnswerError, match=message):
        read_tensor({**fields, **changed}, (torch.float32,), "x")


def kv_config(tmp_path: Path, server: Running, kind: str, **sections: Any) -> RLConfig:
    rollout = {"max_tokens": 6, "kv_scales": kind, **NEVER, **sections.pop("rollout", {})}
    section = EngineSection(name="octavo-server", url=server.url, admin_key=KEY)
    config = block_config(tmp_path, rollout=rollout, **sections)
    return config.model_copy(update={"engine": section})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "_calibrated_once"])
def test_the_loop_is_exact_under_the_servers_scales(start: Path, tmp_path: Path, kind: str) -> None:
    with running(asked(start, kind).build, admin_key=KEY) as server:
        config = kv_config(tmp_path, server, kind, trainer={"steps": 3})
        model, tokenizer = build_policy(config, EASY)
        result = loop.run(config, model=model, tokenizer=tokenizer, task=EASY, progress=False)
    assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 3
    assert [row["kv/scale_lag_max"] for row in result.history] == ([0.0] * 3 if kind == "engine" else [0.0, 1.0, 2.0])
    assert all(0.0 <= row["kv/layer_0/k_flushed_share"] < 1.0 for row in result.history)


def test_steps_are_exact_under_the_trainers_scales(start: Path, tmp_path: Path) -> None:
    """The steps of a run whose first scales are made before its first refit."""
    with running(asked(start, "trainer").build, admin_key=KEY) as server:
        config = kv_config(tmp_path, server, "trainer")
        model, tokenizer = build_policy(config, EASY)
        trainer = Trainer(config, model, tokenizer, EASY, [], RLProgress(False))
        trainer.worker.calibrate_first()
        trainer.worker.publish()
        for step in (1, 2, 3):
            row = trainer.step(step)
            assert row["mismatch/logprob_abs_diff_max"] == 0.0 and row["kv/scale_lag_max"] == 0.0
            held = server.engine.model.kv_table
            assert held is not None and model.kv_table is not None and torch.equal(held.scale, model.kv_table.scale)
            assert row["refit/bytes"] > 0 and "kv/layer_0/k_clipped_share" in row
        trainer.close()


@pytest.mark.slow
def test_a_layer_that_clips_falls_back_at_the_server(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(asked(start, "_fixed").build, admin_key=KEY) as server:
        config = kv_config(tmp_path, server, "_fixed", rollout={"kv_fallback_clip_share": 1e-3})
        model, tokenizer = build_policy(config, EASY)
        with torch.no_grad():
            model.layers[0].self_attn.qkv_proj.weight[-2 * 64 :] *= 3000.0  # V far beyond 448
        model.mark_weights_updated()
        result = loop.run(config, model=model, tokenizer=tokenizer, task=EASY)
        assert server.engine.model.kv_table is not None and server.engine.model.kv_table.high_precision == {0}
    assert [row["kv/num_bf16_layers"] for row in result.history] == [1.0] * 3
    assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 3
    assert "layer 0: the KV cache falls back from FP8 to bf16, for" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_under_the_trainers_scales_goes_on_where_it_was(start: Path, tmp_path: Path) -> None:
    """The scales of the checkpoint's weights go to a fresh server with them."""
    for num_steps in (2, 4):
        with running(asked(start, "trainer").build, admin_key=KEY) as server:
            config = kv_config(tmp_path, server, "trainer", trainer={"steps": num_steps}, run={"checkpoint_every": 1})
            model, tokenizer = build_policy(config, EASY)
            result = loop.run(config, model=model, tokenizer=tokenizer, task=EASY, progress=False)
    assert [row.step for row in result.history] == [1, 2, 3, 4]
    assert [row["mismatch/logprob_abs_diff_max"] for row in result.history] == [0.0] * 4
    assert [row["kv/scale_lag_max"] for row in result.history] == [0.0] * 4
