"""Our own server as the engine: the trainer's very codes over HTTP, exact logprobs back, and what may go wrong."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn")

from octavo import LLM, save_model
from octavo.cli.rl import command
from octavo.integrations.rollout import octavo_server as engine_module
from octavo.integrations.rollout.octavo_server import OctavoServerEngine, OctavoServerSession
from octavo.models import Decoder, Tokenizer, load_model, sequence_logprobs
from octavo.nn import Linear
from octavo.rl import loop
from octavo.rl.engines import (
    EngineError,
    EngineSection,
    EngineTimeoutError,
    StaleVersionError,
    WeightAuditError,
)
from octavo.rl.loop import build_policy
from octavo.rl.refit import refit
from octavo.serve.engine import Engine
from octavo.weights.outgoing import OutgoingWeights
from octavo.weights.wire import buckets
from tests.integrations.rollout.conftest import PROMPTS, SPEC, block_config, make_policy
from tests.rl.conftest import Policy, nudge
from tests.rl.test_loop import EASY
from tests.serve.http.running import Running, running

KEY = "admin"


def serve_checkpoint(directory: Path, tokenizer: Tokenizer) -> Engine:
    """What `octavo serve DIRECTORY --quantization blockwise --kv-cache-dtype fp8 --exact` builds."""
    how: dict[str, Any] = {"quantization": "blockwise", "kv_cache_dtype": "fp8", "exact": True, "device": "cpu"}
    return LLM(directory, tokenizer, **how, max_num_seqs=16, num_kv_pages=40).engine


@dataclasses.dataclass
class Pair:
    """A server, and the policy and engine that a trainer has on its side."""

    server: Running
    engine: OctavoServerEngine
    model: Decoder
    tokenizer: Tokenizer

    def refit(self) -> int:
        return refit(self.model, self.model, self.engine).weight_version

    def sample_exactly(self) -> list[float]:
        """Logprobs of a batch, each the trainer's to the bit."""
        found: list[float] = []
        for generation in self.engine.generate(PROMPTS, SPEC):
            for completion in generation.completions:
                prompt = generation.prompt_token_ids
                expected = sequence_logprobs(self.model, [prompt + completion.token_ids])[0][len(prompt) - 1 :]
                assert completion.logprobs == expected.tolist()
                assert set(completion.weight_versions) == {self.model.weight_version}
                found += completion.logprobs
        return found


def make_engine(server: Running, model: Decoder, tokenizer: Tokenizer, **fields: Any) -> OctavoServerEngine:
    fields = {"timeout_s": 30.0, "update_timeout_s": 30.0, **fields}
    section = EngineSection(name="octavo-server", url=server.url, admin_key=KEY, **fields)
    return OctavoServerEngine(section, tokenizer, model.config)


@pytest.fixture
def pair(start: Path, blocks: Policy) -> Iterator[Pair]:
    model, tokenizer = blocks
    with running(lambda: serve_checkpoint(start, tokenizer), admin_key=KEY) as server:
        it = Pair(server, make_engine(server, model, tokenizer), model, tokenizer)
        it.refit()
        yield it


def test_the_servers_codes_and_logprobs_are_the_trainers_to_the_bit(pair: Pair) -> None:
    for _ in range(2):
        assert pair.sample_exactly()
        nudge(pair.model)
        assert pair.refit() == pair.model.weight_version
    theirs = dict(pair.server.engine.model.named_modules())
    for name, ours in pair.model.named_modules():
        if isinstance(ours, Linear):
            held = theirs[name]
            assert isinstance(held, Linear)
            for a, b in zip(ours.quantized_weight(), held.quantized_weight(), strict=True):
                assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
                assert torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("weights", ["bf16", "fp8-block"])
def test_high_precision_and_codes_give_the_same_answers(pair: Pair, weights: str) -> None:
    engine = make_engine(pair.server, pair.model, pair.tokenizer, weights=weights, bucket_bytes=4096)
    report = refit(pair.model, pair.model, engine)
    assert report.num_bytes == OutgoingWeights.of(pair.model, weights).num_bytes
    assert dataclasses.replace(pair, engine=engine).sample_exactly()


def test_a_prompt_with_little_room_left_gets_what_there_is(pair: Pair) -> None:
    """As an episode of several turns has it, among others that may go on for longer."""
    prompts = [[1] * (pair.engine.max_model_len - room) for room in (2, SPEC.max_tokens, 1, 2)]
    found = pair.engine.generate(prompts, SPEC)
    assert [generation.prompt_token_ids for generation in found] == prompts
    longest = [max(len(c.token_ids) for c in generation.completions) for generation in found]
    assert longest[0] <= 2 and longest[2] == 1 and longest[3] <= 2


def test_pause_caches_and_counters(pair: Pair) -> None:
    pair.engine.generate(PROMPTS, SPEC)
    stats = pair.engine.stats()
    assert stats["num_preemptions"] == 0.0 and stats["num_prefix_query_tokens"] > 0
    pair.engine.reset_prefix_cache()
    pair.engine.pause("wait")
    with pytest.raises(EngineError, match="503"):
        pair.engine.generate(PROMPTS, SPEC)
    pair.engine.resume()
    pair.engine.generate(PROMPTS, SPEC)
    with pytest.raises(EngineError, match="'wait' alone"):
        pair.engine.pause("keep")


def test_a_byte_corrupted_in_flight(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(tensors: dict[str, torch.Tensor], size: int) -> Iterator[bytes]:
        for place, bucket in enumerate(buckets(tensors, size)):
            raw = bytearray(bucket)
            raw[len(raw) // 2] ^= place == 0
            yield bytes(raw)

    nudge(pair.model)
    held = pair.server.engine.weight_version
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "buckets", corrupt)
        with pytest.raises(WeightAuditError, match="the server refused the upload") as caught:
            pair.refit()
    assert caught.value.fault == "corrupted bytes" and caught.value.tensor.startswith("model.")
    assert pair.server.engine.weight_version == held
    pair.engine.generate(PROMPTS, SPEC)  # the old weights, all of them, under their own version
    pair.refit()


def test_a_missing_scale_is_caught_before_anything_is_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    make = OutgoingWeights.of

    def forget(source: Decoder, dialect: str) -> OutgoingWeights:
        outgoing = make(source, dialect)
        del outgoing.tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
        return outgoing

    monkeypatch.setattr(OutgoingWeights, "of", forget)
    with pytest.raises(WeightAuditError, match=r"missing scale: model\.layers\.0\.mlp\.down_proj\.weight_scale_inv"):
        pair.refit()


def test_somebody_elses_update_is_noticed(pair: Pair) -> None:
    other = make_engine(pair.server, pair.model, pair.tokenizer)
    refit(pair.model, pair.model, other)
    with pytest.raises(StaleVersionError, match=r"weight version \d+, and \d+ was committed"):
        pair.engine.generate(PROMPTS, SPEC)


def test_a_server_that_stopped_and_one_that_hangs(pair: Pair) -> None:
    hasty = make_engine(pair.server, pair.model, pair.tokenizer, timeout_s=1e-3)
    hasty.version, hasty.server_version = pair.engine.version, pair.engine.server_version
    with pytest.raises(EngineTimeoutError, match=r"within 0\.001 s"):
        hasty.generate(PROMPTS, SPEC)
    pair.server.stop()
    pair.server.thread.join(30)
    with pytest.raises(EngineError, match=r"cannot be reached|broke off"):
        pair.engine.generate(PROMPTS, SPEC)
    with pytest.raises(EngineError, match=r"cannot be reached|broke off"):
        pair.refit()


def test_a_commit_without_an_answer_is_not_trusted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = OctavoServerEngine.admin

    def lose_the_answer(engine: OctavoServerEngine, path: str, body: Any = None) -> Any:
        answer = admin(engine, path, body)
        if path.endswith("/commit"):
            raise EngineTimeoutError("nothing came")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(OctavoServerEngine, "admin", lose_the_answer)
        with pytest.raises(EngineTimeoutError):
            pair.refit()
    with pytest.raises(EngineError, match=r"cannot be trusted .*nothing came"):
        pair.engine.generate(PROMPTS, SPEC)
    pair.refit()
    pair.engine.generate(PROMPTS, SPEC)


def test_an_upload_that_broke_off_leaves_nothing_open(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(OctavoServerSession, "commit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.refit()
    session = pair.engine.begin_update(pair.model, pair.model.weight_version)
    session.stage()
    assert session.commit() == pair.model.weight_version


def test_buckets_are_the_tensors_one_after_the_other() -> None:
    tensors = {"a": torch.arange(5, dtype=torch.int32), "b": torch.empty(0), "c": torch.ones(3, 3).T}
    whole = b"".join(bytes(t.contiguous().view(torch.uint8).numpy().data) for t in tensors.values() if t.numel())
    for size in (1, 7, 16, 1000):
        pieces = list(buckets(tensors, size))
        assert b"".join(pieces) == whole
        assert {len(piece) for piece in pieces[:-1]} <= {size}


@pytest.mark.slow
def test_the_loop_is_exact_through_a_server(start: Path, tmp_path: Path) -> None:
    config = block_config(tmp_path, trainer={"steps": 3, "minibatches": 2}, rollout={"max_tokens": 6})
    model, tokenizer = build_policy(config, EASY)
    with running(lambda: serve_checkpoint(start, tokenizer), admin_key=KEY) as server:
        loaded = server.engine.weight_version
        section = EngineSection(name="octavo-server", url=server.url, admin_key=KEY)
        config = config.model_copy(update={"engine": section})
        result = loop.run(config, model=model, tokenizer=tokenizer, task=EASY, progress=False)
        assert server.engine.weight_version == loaded + 1 + 3  # handed over at the start, and after each step
    for row in result.history:
        assert row["mismatch/logprob_abs_diff_max"] == 0.0
        assert row["mismatch/policy_lag_max"] == 0.0
        assert row["actor/grad_norm"] > 0
        assert row["engine/num_preemptions"] == 0.0
        assert row["refit/bytes"] > 0


@pytest.mark.slow
def test_the_command_runs_a_recipe_with_a_server(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = make_policy(tmp_path)
    save_model(model, tmp_path / "policy", tokenizer=tokenizer)
    monkeypatch.setenv("OCTAVO_ADMIN_KEY", KEY)
    with running(lambda: serve_checkpoint(start, tokenizer), admin_key=KEY) as server:
        config = tmp_path / "rl.toml"
        config.write_text(
            f'[model]\npath = "{tmp_path / "policy"}"\n[task]\nnum_digits = 1\nheldout_share = 0.3\n'
            f'[engine]\nname = "octavo-server"\nurl = "{server.url}"\n'
            "[warmup]\nsteps = 0\n[rollout]\nprompts_per_step = 4\n[trainer]\nsteps = 2\n[eval]\nnum_prompts = 8\n"
            f'[run]\ndir = "{tmp_path / "run"}"\ntensorboard = false\n'
        )
        loaded = server.engine.weight_version
        command(str(config))
        final = load_model(tmp_path / "run" / "final")
        assert server.engine.weight_version == loaded + 1 + 2
        assert torch.equal(server.engine.model.get_parameter("norm.weight"), final.get_parameter("norm.weight"))
    shown = capfd.readouterr().out
    assert shown.split("max |delta logprob|")[1].splitlines()[0].split() == ["\u2502", "0", "\u2502", "0", "\u2502"]
