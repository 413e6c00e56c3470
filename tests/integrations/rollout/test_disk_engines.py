"""vLLM and SGLang against stand-ins of their documented routes: updates, versions, logprobs, faults by name."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models import sequence_logprobs
from octavo.rl.engines import (
    EngineAnswerError,
    EngineError,
    EngineTimeoutError,
    StaleVersionError,
    WeightAuditError,
)
from octavo.weights.disk import DiskStage
from tests.integrations.rollout.conftest import PROMPTS, SPEC, TASK, Disk
from tests.integrations.rollout.stand_in import HttpError
from tests.rl.conftest import Policy, nudge

GENERATE = {"vllm": "POST /v1/completions", "sglang": "POST /generate"}
LOAD = {"vllm": "POST /collective_rpc", "sglang": "POST /update_weights_from_disk"}
CHECKSUMS = {"vllm": "POST /weight_checker", "sglang": "POST /weights_checker"}


UPDATE = {
    "vllm": """POST /pause, POST /collective_rpc, POST /update_weight_version, POST /reset_prefix_cache,
        GET /weight_info, POST /weight_checker, POST /resume""",
    "sglang": """POST /pause_generation, POST /begin_weight_update, POST /update_weights_from_disk,
        POST /end_weight_update, GET /get_model_info, POST /weights_checker, POST /continue_generation""",
    "session": """POST /pause, POST /start_weight_update, POST /update_weights, POST /finish_weight_update,
        POST /reset_prefix_cache, GET /weight_info, POST /weight_checker, POST /resume""",
}


def assert_updated(disk: Disk, kind: str) -> None:
    assert ", ".join(disk.server.calls) == " ".join(UPDATE[kind].split()) and not disk.server.is_paused


def checkpoints(disk: Disk) -> list[str]:
    return sorted(path.name for path in disk.folder.iterdir() if not path.name.startswith("."))


def assert_logprobs_are_the_policys(disk: Disk, prompts: Any, completions: Any, temperature: float = 1.0) -> None:
    """FP8 blocks over disk and HTTP, and no bit is lost."""
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = prompt + completion.token_ids
        expected = sequence_logprobs(disk.model, [ids], temperature=temperature)[0][len(prompt) - 1 :]
        assert completion.logprobs == expected.tolist()
        assert completion.weight_versions == [disk.model.weight_version] * len(completion.token_ids)


def test_completions_and_new_weights(disk: Disk) -> None:
    generations = disk.engine.generate(PROMPTS, SPEC)
    assert [g.prompt_token_ids for g in generations] == [disk.tokenizer.encode(p) for p in PROMPTS]
    assert [len(g.completions) for g in generations] == [3, 3]
    pairs = [(g.prompt_token_ids, completion) for g in generations for completion in g.completions]
    assert_logprobs_are_the_policys(disk, *zip(*pairs, strict=True))
    for _, completion in pairs:
        stopped = completion.stop_reason == TASK.end
        assert disk.tokenizer.decode(completion.token_ids) == completion.text + stopped * TASK.end
    assert disk.engine.stats()["num_preemptions"] == {"vllm": 7.0, "sglang": 6.0}[disk.engine.name]
    first = checkpoints(disk)
    nudge(disk.model)
    disk.server.calls.clear()
    assert disk.refit() == disk.model.weight_version == disk.engine.version
    assert_updated(disk, disk.engine.name)
    assert len(first) == len(checkpoints(disk)) == 1 and first != checkpoints(disk)
    (generation,) = disk.engine.generate([[1, 2, 3]], dataclasses.replace(SPEC, samples_per_prompt=1, temperature=0.7))
    assert generation.prompt_token_ids == [1, 2, 3]
    assert_logprobs_are_the_policys(disk, [[1, 2, 3]], generation.completions, 0.7)
    if disk.engine.name == "sglang":
        assert disk.server.bodies["POST /update_weights_from_disk"]["flush_cache"] is True
        assert disk.server.bodies["POST /pause_generation"] == {"mode": "retract"}
    disk.engine.close()
    assert checkpoints(disk) == []


def test_what_lies_on_the_disk_are_blocks_and_raw_scales(disk: Disk) -> None:
    from octavo.models.checkpoint.safetensors_io import SafetensorsReader

    (name,) = checkpoints(disk)
    entries = SafetensorsReader(disk.folder / name).entries
    down = "model.layers.0.mlp.down_proj.weight"
    assert (entries[down].dtype, entries[down].shape) == (torch.float8_e4m3fn, (128, 256))
    assert (entries[f"{down}_scale_inv"].dtype, entries[f"{down}_scale_inv"].shape) == (torch.float32, (1, 2))
    assert entries["model.embed_tokens.weight"].dtype == torch.bfloat16
    config = json.loads((disk.folder / name / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_pause_resume_and_the_prefix_cache(disk: Disk) -> None:
    disk.engine.pause("abort")
    assert disk.server.is_paused
    with pytest.raises(EngineError, match="503"):
        disk.engine.generate(PROMPTS, SPEC)
    disk.engine.resume()
    disk.engine.reset_prefix_cache()
    disk.engine.generate(PROMPTS, SPEC)


# Faults


def test_an_engine_that_has_no_weights_hangs_dies_or_is_not_there(disk: Disk) -> None:
    fresh = type(disk.engine)(disk.section, disk.tokenizer, disk.model.config)
    with pytest.raises(EngineError, match="refit"):
        fresh.generate(PROMPTS, SPEC)
    disk.server.before[GENERATE[disk.engine.name]] = disk.server.die
    with pytest.raises(EngineError, match="broke off the connection"):
        disk.engine.generate(PROMPTS, SPEC)
    disk.server.before[GENERATE[disk.engine.name]] = disk.server.hang
    disk.engine.section = disk.section.model_copy(update={"timeout_s": 0.1})
    with pytest.raises(EngineTimeoutError, match=r"0\.1 s"):
        disk.engine.generate(PROMPTS, SPEC)
    disk.server.stop()
    with pytest.raises(EngineError, match="cannot be reached"):
        disk.engine.generate(PROMPTS, SPEC)


Spoil = Callable[[list[Any]], Any]


def logprobs_of(row: Any) -> Any:
    return row["meta_info"]["output_token_logprobs"] if "meta_info" in row else row["logprobs"]["token_logprobs"]


def drop_logprobs(row: Any) -> None:
    del row.get("meta_info", row)["output_token_logprobs" if "meta_info" in row else "logprobs"]


def end_by_abort(row: Any) -> None:
    if meta := row.get("meta_info"):
        meta["finish_reason"] = {"type": "abort"}
    else:
        row["finish_reason"] = "abort"


def spoil_first_token(row: Any, token: int | None, logprob: float | None) -> None:
    """Give a completion of either engine's another first token or logprob."""
    if "meta_info" in row:
        row["output_ids"][0] = row["output_ids"][0] if token is None else token
        logprobs_of(row)[0][:2] = [logprob, row["output_ids"][0]]
    else:
        row["token_ids"][0] = row["token_ids"][0] if token is None else token
        logprobs_of(row)[0] = logprob


# what becomes of the completions on their way -> the error, and what it names
SPOILED: list[tuple[Spoil, type[EngineError], str]] = [
    (lambda rows: spoil_first_token(rows[0], None, None), EngineError, "nan"),
    (lambda rows: spoil_first_token(rows[0], None, 0.5), EngineError, r"0\.5"),
    (lambda rows: spoil_first_token(rows[0], 10**6, -1.0), EngineError, "vocabulary"),
    (lambda rows: logprobs_of(rows[0]).pop(0), EngineAnswerError, "off by"),
    (lambda rows: logprobs_of(rows[0]).pop(), EngineAnswerError, "off by"),
    (lambda rows: drop_logprobs(rows[0]), EngineError, "logprobs"),
    (lambda rows: end_by_abort(rows[0]), EngineError, "'abort'"),
    (lambda rows: rows.pop(), EngineAnswerError, "5 completions came, of 6"),
]
OF_ONE: dict[str, tuple[Spoil, type[EngineError], str]] = {
    "vllm": (lambda rows: [r.update(index=5 - r["index"]) for r in rows], EngineAnswerError, "another prompt"),
    "sglang": (lambda rows: rows[-1]["meta_info"].update(weight_version="other"), StaleVersionError, "other"),
}


def test_answers_that_nothing_can_be_learned_from(disk: Disk) -> None:
    for spoil, error, named in [*SPOILED, OF_ONE[disk.engine.name]]:

        def change(answer: Any, spoil: Spoil = spoil) -> Any:
            spoil(answer["choices"] if disk.engine.name == "vllm" else answer)
            return answer

        disk.server.change[GENERATE[disk.engine.name]] = change
        with pytest.raises(error, match=named):
            disk.engine.generate(PROMPTS, SPEC)
    disk.server.change.clear()
    disk.engine.generate(PROMPTS, SPEC)
    disk.server.version = "default"  # it was restarted, or updated by another client
    with pytest.raises(StaleVersionError, match="'default'"):
        disk.engine.generate(PROMPTS, SPEC)


def test_a_vllm_whose_weights_change_in_a_batch(session: Disk) -> None:
    def change(answer: Any) -> Any:
        session.server.version = "another's"
        return answer

    session.server.change[GENERATE["vllm"]] = change
    with pytest.raises(StaleVersionError, match="another's"):
        session.engine.generate(PROMPTS, SPEC)


def test_an_engine_that_does_not_take_a_version_over(disk: Disk) -> None:
    nudge(disk.model)
    old = disk.server.version

    def keep(answer: Any) -> Any:
        disk.server.version = old
        return answer

    last = {"vllm": "POST /update_weight_version", "sglang": "POST /end_weight_update"}[disk.engine.name]
    disk.server.change[last] = keep
    with pytest.raises(EngineError, match="after the update it says weights 'octavo-"):
        disk.refit()
    with pytest.raises(EngineError, match="cannot be trusted"):
        disk.engine.generate(PROMPTS, SPEC)


def test_a_load_that_fails_stops_the_batches_until_one_succeeds(disk: Disk) -> None:
    def fail() -> None:
        raise HttpError(500, {"error": {"message": "out of memory"}})

    disk.server.before[LOAD[disk.engine.name]] = fail
    nudge(disk.model)
    with pytest.raises(EngineError, match=r"500: .*out of memory"):
        disk.refit()
    assert len(checkpoints(disk)) == 1  # the one that the server read last
    with pytest.raises(EngineError, match=r"cannot be trusted since an update failed .*out of memory"):
        disk.engine.generate(PROMPTS, SPEC)
    assert disk.server.is_paused  # nobody else samples from half of an update
    disk.server.before.clear()
    disk.refit()
    disk.engine.generate(PROMPTS, SPEC)


def test_a_tensor_that_the_engine_did_not_take_over(disk: Disk) -> None:
    held = "model.layers.0.self_attn.qkv_proj.weight"
    stale = disk.server.checksums[held]

    def skip(answer: Any) -> Any:
        for checksums in (answer.get("checksums"), *(row["checksums"] for row in answer.get("ranks", []))):
            if checksums is not None:
                checksums[held] = stale
        return answer

    disk.server.change[CHECKSUMS[disk.engine.name]] = skip
    disk.refit()  # the same weights: checksums stay, and rightly
    nudge(disk.model)
    with pytest.raises(WeightAuditError) as caught:
        disk.refit()
    assert caught.value.fault == "un-updated tensor"
    assert caught.value.tensor.endswith(held)


def test_a_server_without_checksums(disk: Disk) -> None:
    disk.server.missing.add(CHECKSUMS[disk.engine.name])
    nudge(disk.model)
    disk.refit()
    assert disk.engine.their_checksums is None
    disk.engine.generate(PROMPTS, SPEC)


def test_a_byte_that_the_disk_corrupts(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = DiskStage.verify

    def corrupt(stage: DiskStage, *args: Any) -> None:
        file = stage.path / "model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 0x01  # the last weight's last bit
        file.write_bytes(raw)
        verify(stage, *args)

    monkeypatch.setattr(DiskStage, "verify", corrupt)
    nudge(disk.model)
    disk.server.calls.clear()
    with pytest.raises(WeightAuditError, match=r"corrupted bytes|un-updated tensor"):
        disk.refit()
    assert disk.server.calls == []  # it was never told
    assert len(checkpoints(disk)) == 1
    disk.engine.generate(PROMPTS, SPEC)  # from the old weights, under their own version


# What one engine alone has


@pytest.fixture
def session(blocks: Policy, tmp_path: Path) -> Iterator[Disk]:
    it = Disk("vllm", blocks, tmp_path, update="session")
    with it.server:
        it.refit()
        yield it


def test_vllm_updates_in_a_session(session: Disk) -> None:
    assert session.server.calls.count("POST /init_weight_transfer_engine") == 1
    nudge(session.model)
    session.server.calls.clear()
    session.refit()
    assert_updated(session, "session")
    session.engine.generate(PROMPTS, SPEC)


def test_vllm_that_keeps_its_prefix_cache(session: Disk) -> None:
    session.server.change["POST /reset_prefix_cache"] = lambda _: {"success": False}
    nudge(session.model)
    with pytest.raises(EngineError, match="old keys and values would be used"):
        session.refit()


def test_sglang_without_sessions_and_one_that_says_no_success(blocks: Policy, tmp_path: Path) -> None:
    disk = Disk("sglang", blocks, tmp_path)
    disk.server.missing |= {"POST /begin_weight_update", "POST /end_weight_update"}
    with disk.server:
        disk.refit()
        disk.engine.generate(PROMPTS, SPEC)
        assert "POST /end_weight_update" not in disk.server.calls
        disk.server.change[LOAD["sglang"]] = lambda _: {"success": False, "message": "shape mismatch"}
        with pytest.raises(EngineError, match="shape mismatch"):
            disk.refit()
