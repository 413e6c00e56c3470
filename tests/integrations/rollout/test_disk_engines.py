"""vLLM and SGLang against stand-ins of their documented routes: updates, versions, logprobs, faults by name."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models import Decoder, Tokenizer, sequence_logprobs
from octavo.rl.engines import (
    EngineAnswerError,
    EngineError,
    EngineTimeoutError,
    StaleVersionError,
    WeightAuditError,
)
from octavo.rl.rollout import generate_rollouts
from octavo.weights.disk import DiskStage
from tests.integrations.rollout.conftest import PROMPTS, SPEC, TASK, Disk, nudge
from tests.integrations.rollout.stand_in import HttpError

GENERATE = {"vllm": "POST /v1/completions", "sglang": "POST /generate"}
LOAD = {"vllm": "POST /collective_rpc", "sglang": "POST /update_weights_from_disk"}
CHECKSUMS = {"vllm": "POST /weight_checker", "sglang": "POST /weights_checker"}


def checkpoints(disk: Disk) -> list[str]:
    return sorted(path.name for path in disk.folder.iterdir() if not path.name.startswith("."))


def test_completions_are_the_engines_with_its_logprobs(disk: Disk) -> None:
    generations = disk.engine.generate(PROMPTS, SPEC)
    assert [g.prompt_token_ids for g in generations] == [disk.tokenizer.encode(p) for p in PROMPTS]
    for generation in generations:
        assert len(generation.completions) == 3
        for completion in generation.completions:
            sequence = generation.prompt_token_ids + completion.token_ids
            expected = sequence_logprobs(disk.model, [sequence])[0][len(generation.prompt_token_ids) - 1 :]
            assert completion.logprobs == expected.tolist()  # FP8 blocks over disk and HTTP, and no bit is lost
            assert completion.weight_versions == [disk.model.weight_version] * len(completion.token_ids)
            stopped = completion.stop_reason == TASK.end
            assert disk.tokenizer.decode(completion.token_ids) == completion.text + stopped * TASK.end


def test_rollouts_and_token_ids(disk: Disk) -> None:
    rollouts = generate_rollouts(disk.engine, TASK, PROMPTS, samples_per_prompt=3, max_tokens=5, temperature=0.7)
    assert rollouts.prompts == [prompt for prompt in PROMPTS for _ in range(3)]
    assert rollouts.rollout_logprobs.shape == (rollouts.num_tokens,)
    body = disk.server.bodies[GENERATE[disk.engine.name]]
    assert body.get("temperature", body.get("sampling_params", {}).get("temperature")) == 0.7
    ids = [[1, 2, 3]]
    assert disk.engine.generate(ids, SPEC)[0].prompt_token_ids == ids[0]


def test_new_weights_reach_it_and_the_old_checkpoint_goes(disk: Disk) -> None:
    first = checkpoints(disk)
    nudge(disk.model)
    version = disk.refit()
    assert version == disk.model.weight_version == disk.engine.version
    assert len(first) == len(checkpoints(disk)) == 1 and first != checkpoints(disk)
    completion = disk.engine.generate(PROMPTS[:1], SPEC)[0].completions[0]
    prompt = disk.tokenizer.encode(PROMPTS[0])
    expected = sequence_logprobs(disk.model, [prompt + completion.token_ids])[0][len(prompt) - 1 :]
    assert completion.logprobs == expected.tolist()
    assert set(completion.weight_versions) == {version}
    assert not disk.server.is_paused
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


def test_it_pauses_loads_and_resumes_in_this_order(disk: Disk) -> None:
    nudge(disk.model)
    disk.server.calls.clear()
    disk.refit()
    expected = {
        "vllm": [
            "POST /pause",
            "POST /collective_rpc",
            "POST /update_weight_version",
            "POST /reset_prefix_cache",
            "GET /weight_info",
            "POST /weight_checker",
            "POST /resume",
        ],
        "sglang": [
            "POST /pause_generation",
            "POST /begin_weight_update",
            "POST /update_weights_from_disk",
            "POST /end_weight_update",
            "GET /get_model_info",
            "POST /weights_checker",
            "POST /continue_generation",
        ],
    }
    assert disk.server.calls == expected[disk.engine.name]
    if disk.engine.name == "sglang":
        assert disk.server.bodies["POST /update_weights_from_disk"]["flush_cache"] is True
        assert disk.server.bodies["POST /pause_generation"] == {"mode": "retract"}


def test_preemptions_are_told(disk: Disk) -> None:
    disk.engine.generate(PROMPTS, SPEC)
    assert disk.engine.stats()["num_preemptions"] == {"vllm": 7.0, "sglang": 6.0}[disk.engine.name]


def test_pause_resume_and_the_prefix_cache(disk: Disk) -> None:
    disk.engine.pause("abort")
    assert disk.server.is_paused
    with pytest.raises(EngineError, match="503"):
        disk.engine.generate(PROMPTS, SPEC)
    disk.engine.resume()
    disk.engine.reset_prefix_cache()
    disk.engine.generate(PROMPTS, SPEC)


def test_no_batch_before_the_first_weights(disk: Disk) -> None:
    fresh = type(disk.engine)(disk.section, disk.tokenizer, disk.model.config)
    with pytest.raises(EngineError, match="refit comes before the first batch"):
        fresh.generate(PROMPTS, SPEC)


# Faults


def test_an_engine_that_is_not_there(disk: Disk) -> None:
    disk.server.stop()
    with pytest.raises(EngineError, match="cannot be reached"):
        disk.engine.generate(PROMPTS, SPEC)


def test_an_engine_that_dies_in_a_batch(disk: Disk) -> None:
    disk.server.before[GENERATE[disk.engine.name]] = disk.server.die
    with pytest.raises(EngineError, match="broke off the connection"):
        disk.engine.generate(PROMPTS, SPEC)


def test_an_engine_that_hangs(disk: Disk) -> None:
    disk.engine.section = disk.section.model_copy(update={"timeout_s": 0.2})
    disk.server.before[GENERATE[disk.engine.name]] = disk.server.hang
    began = time.monotonic()
    with pytest.raises(EngineTimeoutError, match=r"did not answer within 0\.2 s"):
        disk.engine.generate(PROMPTS, SPEC)
    assert time.monotonic() - began < 5


def test_an_engine_that_was_restarted_or_updated_by_another(disk: Disk) -> None:
    disk.server.version = "default"
    with pytest.raises(StaleVersionError, match="'default'"):
        disk.engine.generate(PROMPTS, SPEC)


def test_an_engine_whose_weights_change_in_a_batch(disk: Disk) -> None:
    def change(answer: Any) -> Any:
        disk.server.version = "somebody else's"
        if disk.engine.name == "sglang":
            answer[-1]["meta_info"]["weight_version"] = "somebody else's"
        return answer

    disk.server.change[GENERATE[disk.engine.name]] = change
    with pytest.raises(StaleVersionError, match="somebody else's"):
        disk.engine.generate(PROMPTS, SPEC)


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
    disk.server.is_open = False  # as after a restart
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
    disk.server.routes = {k: v for k, v in type(disk.server).routes.items() if k != CHECKSUMS[disk.engine.name]}
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


@pytest.mark.parametrize("cut", ["first", "last"])
def test_logprobs_that_are_one_short(disk: Disk, cut: str) -> None:
    def shorten(answer: Any) -> Any:
        row = answer["choices"][0]["logprobs"] if disk.engine.name == "vllm" else answer[0]["meta_info"]
        name = "token_logprobs" if disk.engine.name == "vllm" else "output_token_logprobs"
        row[name] = row[name][1:] if cut == "first" else row[name][:-1]
        return answer

    disk.server.change[GENERATE[disk.engine.name]] = shorten
    with pytest.raises(EngineAnswerError, match="off by"):
        disk.engine.generate(PROMPTS, SPEC)


def spoil(completion: dict[str, Any], what: str) -> None:
    """Change one completion of either engine's."""
    meta = completion.get("meta_info")
    if what == "null":
        if meta is None:
            completion["logprobs"]["token_logprobs"][0] = None
        else:
            meta["output_token_logprobs"][0][0] = None
    elif what == "positive":
        if meta is None:
            completion["logprobs"]["token_logprobs"][0] = 0.5
        else:
            meta["output_token_logprobs"][0][0] = 0.5
    elif what == "no logprobs":
        (completion if meta is None else meta).pop("logprobs" if meta is None else "output_token_logprobs")
    elif what == "token":
        completion["token_ids" if meta is None else "output_ids"][0] = 10**6
        if meta is not None:
            meta["output_token_logprobs"][0][1] = 10**6
    else:
        completion["finish_reason"] = "abort"
        if meta is not None:
            meta["finish_reason"] = {"type": "abort"}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("null", "is nan"),
        ("positive", r"is 0\.5; it must be finite and <= 0"),
        ("no logprobs", "the answer has no"),
        ("token", "outside the policy's vocabulary"),
        ("abort", "ended with 'abort'"),
    ],
)
def test_answers_that_nothing_can_be_learned_from(disk: Disk, what: str, message: str) -> None:
    def change(answer: Any) -> Any:
        spoil((answer["choices"] if disk.engine.name == "vllm" else answer)[0], what)
        return answer

    disk.server.change[GENERATE[disk.engine.name]] = change
    with pytest.raises(EngineError, match=message):
        disk.engine.generate(PROMPTS, SPEC)


def test_too_few_completions(disk: Disk) -> None:
    def drop(answer: Any) -> Any:
        (answer["choices"] if disk.engine.name == "vllm" else answer).pop()
        return answer

    disk.server.change[GENERATE[disk.engine.name]] = drop
    with pytest.raises(EngineAnswerError, match="5 completions came, of 6"):
        disk.engine.generate(PROMPTS, SPEC)


# What one engine alone has


@pytest.fixture
def session(blocks: tuple[Decoder, Tokenizer], tmp_path: Path) -> Iterator[Disk]:
    it = Disk("vllm", blocks, tmp_path, update="session")
    with it.server:
        it.refit()
        yield it


def test_vllm_updates_in_a_session(session: Disk) -> None:
    nudge(session.model)
    session.server.calls.clear()
    session.refit()
    assert session.server.calls == [
        "POST /pause",
        "POST /start_weight_update",
        "POST /update_weights",
        "POST /finish_weight_update",
        "POST /reset_prefix_cache",
        "GET /weight_info",
        "POST /weight_checker",
        "POST /resume",
    ]
    session.engine.generate(PROMPTS, SPEC)


def test_vllm_that_keeps_its_prefix_cache(session: Disk) -> None:
    session.server.change["POST /reset_prefix_cache"] = lambda _: {"success": False}
    nudge(session.model)
    with pytest.raises(EngineError, match="old keys and values would be used"):
        session.refit()


def test_vllm_that_mixes_prompts_up(session: Disk) -> None:
    def swap(answer: Any) -> Any:
        for choice in answer["choices"]:
            choice["index"] = len(answer["choices"]) - 1 - choice["index"]
        return answer

    session.server.change["POST /v1/completions"] = swap
    with pytest.raises(EngineAnswerError, match="another prompt"):
        session.engine.generate(PROMPTS, SPEC)


def test_sglang_without_sessions(blocks: tuple[Decoder, Tokenizer], tmp_path: Path) -> None:
    disk = Disk("sglang", blocks, tmp_path)
    sessions = ("POST /begin_weight_update", "POST /end_weight_update")
    disk.server.routes = {k: v for k, v in disk.server.routes.items() if k not in sessions}
    with disk.server:
        disk.refit()
        disk.engine.generate(PROMPTS, SPEC)
        assert "POST /end_weight_update" not in disk.server.calls


def test_sglang_that_says_no_success(blocks: tuple[Decoder, Tokenizer], tmp_path: Path) -> None:
    disk = Disk("sglang", blocks, tmp_path)
    disk.server.change["POST /update_weights_from_disk"] = lambda _: {"success": False, "message": "shape mismatch"}
    with disk.server, pytest.raises(EngineError, match=r"did not succeed: .*shape mismatch"):
        disk.refit()
