"""Router replay with our own server: where each token went, over HTTP, and what cannot be asked for."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("uvicorn")

from octavo import save_model
from octavo.cli.serve import Asked
from octavo.errors import ConfigError
from octavo.integrations.rollout.octavo_server import OctavoServerEngine
from octavo.nn.router_watch import sparse_blocks
from octavo.rl import loop
from octavo.rl.config import RLConfig
from octavo.rl.engines import EngineAnswerError, EngineError, EngineSection, SamplingSpec
from octavo.rl.engines.build import build_engine
from octavo.rl.refit import refit
from octavo.rl.rollout import generate_rollouts
from octavo.serve.engine import EngineConfig
from octavo.serve.engine.expert_choices import RoutedExpertsFuture
from tests.integrations.rollout.test_octavo_server import KEY, Pair, serve_checkpoint
from tests.rl.conftest import Policy
from tests.rl.test_loop import EASY
from tests.rl.test_moe import moe_config, moe_policy
from tests.rl.test_moe_replay import TwoTurns, inexact_config, trainer_choices
from tests.serve.http.running import Running, running

SPEC = SamplingSpec(samples_per_prompt=3, max_tokens=6, temperature=1.0, stop=EASY.end)


def serve(path: Path, *, records: bool = True, **how: Any) -> Asked:
    """What `octavo serve PATH -q blockwise --kv-cache-dtype fp8 --enable-return-routed-experts` asks for."""
    fields = {"quantization": "blockwise", "kv_cache_dtype": "fp8", "attention_dtype": "auto", "exact": False}
    limits = EngineConfig(max_num_seqs=16, num_kv_pages=40, enable_return_routed_experts=records)
    return Asked(path, None, {**fields, "device": "cpu", **how}, limits)


def section_of(server: Running) -> EngineSection:
    return EngineSection(name="octavo-server", url=server.url, admin_key=KEY, timeout_s=30.0, update_timeout_s=30.0)


def save_policy(config: RLConfig, path: Path) -> Policy:
    model, tokenizer = moe_policy(config)
    save_model(model, path, tokenizer=tokenizer)
    return model, tokenizer


@contextmanager
def paired(tmp_path: Path, *, records: bool = True, num_experts: int = 8, num_layers: int = 2) -> Iterator[Pair]:
    """A policy in exact numerics, which a server of the same numerics samples."""
    config = moe_config(tmp_path, num_experts=num_experts, model={"num_hidden_layers": num_layers})
    model, tokenizer = save_policy(config, tmp_path / "model")
    model.set_numerics(config.trainer_numerics)
    with running(serve(tmp_path / "model", records=records, exact=True).build, admin_key=KEY) as server:
        engine = build_engine(section_of(server), model, tokenizer, max_num_seqs=16, seed=0, router_replay=True)
        assert isinstance(engine, OctavoServerEngine)
        refit(model, model, engine)
        yield Pair(server, engine, model, tokenizer)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with paired(tmp_path) as it:
        yield it


def assert_choices_are_the_trainers(pair: Pair, dtype: torch.dtype, num_prompts: int = 4) -> None:
    generations = pair.engine.generate(EASY.prompts("train", num_prompts, 1), SPEC)
    sequences = [g.prompt_token_ids + c.token_ids for g in generations for c in g.completions]
    given = [c.routed_experts for g in generations for c in g.completions]
    for ids, ours, theirs in zip(sequences, trainer_choices(pair.model, sequences), given, strict=True):
        assert theirs is not None and theirs.dtype == dtype
        assert theirs.shape == (len(ids) - 1, len(pair.model.layers), 2)
        assert torch.equal(ours, theirs.long())


def test_the_servers_choices_are_the_trainers(pair: Pair) -> None:
    """Exact numerics as the oracle, before and after an update."""
    assert_choices_are_the_trainers(pair, torch.uint8)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in sparse_blocks(pair.model):
            block.gate.weight.add_(0.5 * torch.randn(block.gate.weight.shape, generator=generator))
    pair.model.mark_weights_updated()
    refit(pair.model, pair.model, pair.engine)
    assert_choices_are_the_trainers(pair, torch.uint8)


@pytest.mark.largest
def test_more_experts_than_a_byte_tells_apart(tmp_path: Path) -> None:
    with paired(tmp_path, num_experts=264, num_layers=1) as pair:
        assert_choices_are_the_trainers(pair, torch.int16, num_prompts=1)


def test_choices_of_several_turns(pair: Pair) -> None:
    task = TwoTurns(num_digits=1, heldout_share=0.3)
    prompts = EASY.prompts("train", 4, 1)
    rollouts = generate_rollouts(pair.engine, task, prompts, samples_per_prompt=4, max_tokens=40, temperature=1.0)
    for ours, theirs in zip(trainer_choices(pair.model, rollouts.sequences), rollouts.routed_experts, strict=True):
        assert torch.equal(ours, theirs.long())


def test_what_a_client_sees(pair: Pair) -> None:
    fields: dict[str, Any] = {"prompt": ["1+1=", "2+3="], "n": 2, "max_tokens": 4, "seed": 1, "return_token_ids": True}
    assert "routed_experts" not in pair.server.complete(**fields)["choices"][0]
    whole = pair.server.complete(**fields, return_routed_experts=True)["choices"]
    for choice in whole:
        found, num_tokens = choice["routed_experts"], len("1+1=") + len(choice["token_ids"])
        assert (found["dtype"], found["shape"]) == ("uint8", [num_tokens - 1, 2, 2])
        assert len(base64.b64decode(found["data"])) == (num_tokens - 1) * 4
    streamed: dict[int, list[Any]] = {index: [] for index in range(4)}
    body = {**fields, "return_routed_experts": True, "stream": True}
    with pair.server.client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                streamed[choice["index"]].append(choice)
    for index, pieces in streamed.items():
        assert all("routed_experts" not in piece for piece in pieces[:-1])
        assert pieces[-1]["routed_experts"] == whole[index]["routed_experts"]
    pair.server.assert_at_rest()


def test_a_reading_that_fails_loses_nothing_before_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both prompts end in one batch; the second one's reading fails."""
    readings: list[object] = []
    wait = RoutedExpertsFuture.wait

    def fail_second(self: RoutedExpertsFuture) -> torch.Tensor:
        readings.append(self)
        if len(readings) == 2:
            raise RuntimeError("the copy failed")
        return wait(self)

    monkeypatch.setattr(RoutedExpertsFuture, "wait", fail_second)
    fields = {"prompt": ["1+1=", "2+3="], "max_tokens": 1, "stream": True, "return_routed_experts": True}
    events = []
    with (
        suppress(httpx.RemoteProtocolError),  # it ends without its last piece
        pair.server.client.stream("POST", "/v1/completions", json=fields) as answer,
    ):
        for line in filter(None, answer.iter_lines()):
            events.append(json.loads(line.removeprefix("data: ")))
    assert [event["choices"][0]["index"] for event in events[:-1]] == [0]
    assert "routed_experts" in events[0]["choices"][0] and events[-1]["error"]["code"] == "internal_error"
    pair.server.assert_at_rest()


def test_what_cannot_be_returned_is_refused(tmp_path: Path, blocks: Policy) -> None:
    with paired(tmp_path, records=False) as pair:
        assert pair.server.engine.model_runner.choices is None
        with pytest.raises(EngineError, match="start it with --enable-return-routed-experts"):
            pair.engine.generate(["1+1="], SPEC)
        answer = pair.server.post("/v1/completions", prompt="1+1=", return_routed_experts=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_routed_experts")
        with pytest.raises(ConfigError, match="this policy has none"):
            build_engine(section_of(pair.server), *blocks, max_num_seqs=1, seed=0, router_replay=True)
    save_model(blocks[0], tmp_path / "dense", tokenizer=blocks[1])
    with running(lambda: serve_checkpoint(tmp_path / "dense", blocks[1])) as server:
        answer = server.post("/v1/completions", prompt="1+1=", return_routed_experts=True)
        assert answer.status_code == 400 and "this model has no experts" in answer.json()["error"]["message"]
        answer = server.post("/v1/chat/completions", messages=[], return_routed_experts=True)
        assert answer.status_code == 400
    with pytest.raises(ConfigError, match="--enable-return-routed-experts: this model has no experts"):
        serve(tmp_path / "dense").check()
    serve(tmp_path / "model").check()


def test_a_server_that_left_the_experts_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    post = pair.engine.client.post

    def strip(path: str, body: Any = None, **rest: Any) -> Any:
        answer = post(path, body, **rest)
        for choice in answer["choices"]:
            del choice["routed_experts"]
        return answer

    monkeypatch.setattr(pair.engine.client, "post", strip)
    with pytest.raises(EngineAnswerError, match="the answer has no routed_experts"):
        pair.engine.generate(["1+1="], SPEC)


@pytest.mark.parametrize("trainer", [{}, {"minibatches": 2, "micro_batch_sequences": 5}], ids=["one", "minibatches"])
def test_a_run_replays_a_servers_choices(tmp_path: Path, trainer: dict[str, Any]) -> None:
    config = inexact_config(tmp_path, trainer)
    model, tokenizer = save_policy(config, tmp_path / "model")
    with running(serve(tmp_path / "model").build, admin_key=KEY) as server:
        config = config.model_copy(update={"engine": section_of(server)})
        result = loop.run(config, model=model, tokenizer=tokenizer, task=EASY, progress=False)
    for row in result.history:
        assert 0.0 < row["router_replay/flipped_choices_share"] <= row["router_replay/flipped_tokens_share"] < 1.0
        assert row["mismatch/logprob_abs_diff_max"] > 0.0
        assert row["actor/grad_norm"] > 0.0
    last = result.last_rollouts
    assert [len(x) for x in last.routed_experts] == [len(ids) - 1 for ids in last.sequences]
    assert all(block.replay is None for block in sparse_blocks(model))
