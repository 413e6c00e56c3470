"""A policy sharded over the ranks that torchrun starts: tokens, metrics and weights have the bits of one process."""

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, DataError, ExactnessError, NonFiniteError, OctavoError
from octavo.integrations.config import to_toml
from octavo.models import Decoder, Tokenizer
from octavo.parallel import is_sharded
from octavo.parallel.gather import gathers_codes
from octavo.rl import learner, loop
from octavo.rl.checkpoint import open_store
from octavo.rl.config import RLConfig
from octavo.rl.engines import EngineError
from octavo.rl.history import StepRow
from octavo.rl.progress import RLProgress
from octavo.run.metrics import METRICS_FILE, read_metrics
from octavo.serve import LLM
from tests import forks
from tests.quiet import cores_shared
from tests.ranks import run_ranks
from tests.rl.conftest import nudge, tiny_config
from tests.rl.test_loop import EASY, EasyTask
from tests.rl.test_moe_replay import TwoTurns

ORDERED = {"reduction": "ordered", "timeout_s": 60}
OWN = ("timing_s/", "perf/", "engine/", "refit/bytes")  # a clock's, or a rank's own
EXPERTS = {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
BLOCKS = {"hidden_size": 256, "intermediate_size": 256, **HEADS}  # all whole on 2 ranks, some on 4
INEXACT = {"exact": False, "correction": {"kind": "token_tis"}, "trainer": {"recipe": "bf16"}}
CUT = {"hidden_size": 256, "intermediate_size": 256, **HEADS, "head_dim": 128}  # whole blocks of each of 2 ranks
SLOWLY = {"trainer": {"optimizer": {"lr": 1e-3, "weight_decay": 0.0, "max_grad_norm": 0.5}}}
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "kept": {"trainer": {"gather_once": True, "micro_batch_sequences": 3}},
    "coded": {"model": BLOCKS, "parallel": {"all_gather_dtype": "fp8"}, "trainer": {"gather_once": True}},
    "lent": {"model": BLOCKS, "parallel": {"all_gather_dtype": "fp8"}, "rollout": {"keep_weights": False}},
    "cut": {"model": CUT, "parallel": {"all_gather_dtype": "fp8"}, "rollout": {"tensor_parallel_size": 2}} | SLOWLY,
    "turns": {"algorithm": {"filter_groups": True, "max_gen_batches": 2}, "rollout": {"keep_weights": False}},
    "experts": {"model": EXPERTS, "trainer": {"micro_batch_sequences": 3}},
    "inexact": INEXACT | {"rollout": {"recipe": "blockwise", "keep_weights": False}},
}
SLOW = pytest.mark.slow


def config_of(folder: Path, num_ranks: int, name: str = "exact", **sections: Any) -> RLConfig:
    """Two mini-batches of 12 sequences in micro-batches that the ranks share; three prompts, which they do not."""
    fields = {**VARIANTS[name], **sections}
    fields["parallel"] = {**VARIANTS[name].get("parallel", {}), **sections.get("parallel", {})}
    optimizer = {"lr": 1e-2, "weight_decay": 0.0, "max_grad_norm": 0.5}
    trainer = {"minibatches": 2, "micro_batch_sequences": {2: 8, 4: 3}[num_ranks], "optimizer": optimizer}
    rollout = {"prompts_per_step": 3, "samples_per_prompt": 8, **fields.pop("rollout", {})}
    trainer |= fields.pop("trainer", {})
    run = {"save": True, "transcripts_every": 1}
    return tiny_config(folder, rollout=rollout, trainer=trainer, eval={"every": 2, "num_prompts": 5}, run=run, **fields)


def task_of(name: str) -> EasyTask:
    return TwoTurns(num_digits=1, heldout_share=0.3) if name == "turns" else EASY


def train(name: str, config: RLConfig, **keywords: Any) -> dict[str, Any]:
    result = loop.run(config, progress=False, task=task_of(name), **keywords)
    last = result.last_rollouts
    assert gathers_codes(result.model) == (is_sharded(result.model) and config.parallel.all_gather_dtype == "fp8")
    return {
        "rewards": [result.heldout_reward_before, result.heldout_reward_after, *last.rewards.tolist()],
        "tokens": last.sequences,
        "logprobs": last.rollout_logprobs.tolist(),
        "rows": [summary(row) for row in result.history],
        "bytes": [row["refit/bytes"] * config.rollout.tensor_parallel_size for row in result.history],
    }


def summary(row: StepRow) -> dict[str, float]:
    """What must not depend on the clock or on the ranks."""
    own = ("seconds", "tokens_per_s", *OWN)
    return {key: value for key, value in row.as_dict().items() if not key.startswith(own)}


def job(rank: int, folder: str, num_ranks: int, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    build = loop.build_policy
    loop.build_policy = lambda *args: warm_apart(rank, *build(*args))  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        said = found["said"] = []
        patch.setattr(RLProgress, "say", lambda _, text: said.append(text))
        for name in names:
            found[name] = train(name, config_of(Path(folder, name), num_ranks, name, parallel=ORDERED))
    begun = config_of(Path(folder, "begun"), num_ranks, parallel=ORDERED)
    found["resumed"] = train("exact", begun)["rows"]
    found["stopped_by"] = stopped_run(rank, config_of(Path(folder, "stopped"), num_ranks, parallel=ORDERED))
    found["errors"] = {name: error_of(rank, Path(folder, "errors"), num_ranks, name) for name in FAULTS}
    return found


def warm_apart(rank: int, model: Decoder, tokenizer: Tokenizer) -> tuple[Decoder, Tokenizer]:
    """As warm starts on GPUs leave the ranks' policies: the first one's counts."""
    if rank:
        nudge(model)
    return model, tokenizer


def stopped_run(rank: int, config: RLConfig) -> str | None:
    """The last rank alone gets a signal in the second step."""

    def stop(row: StepRow) -> None:
        if row.step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    result = loop.run(config, progress=False, task=EASY, on_step=stop)
    assert len(result.history) == 2
    return result.stopped_by


class Undecided(EasyTask):
    """A verifier that follows from more than prompt and completion."""

    offset = 0.0

    def score(self, prompt: str, completion: str) -> float:
        return super().score(prompt, completion) + self.offset


class Chat(EasyTask):
    """A task whose prompts are conversations."""

    max_prompt_tokens = 0

    def messages(self, prompt: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}]


def end_apart(rank: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Episodes end at once on the second rank alone."""
    whole = TwoTurns.step
    patch.setattr(TwoTurns, "step", lambda *args: dataclasses.replace(whole(*args), done=rank == 1))
    return {"task": TwoTurns(num_digits=1, heldout_share=0.3)}


def spoil_loss(rank: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    whole = learner.policy_objective

    def spoiled(*args: Any) -> Any:
        found = whole(*args)
        return type(found)(found.loss * torch.nan, found.uncorrected_loss, found.sums)

    if rank == 1:
        patch.setattr(learner, "policy_objective", spoiled)
    return {}


def spoil_logprobs(rank: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    whole = learner.packed_logprobs
    if rank == 1:
        patch.setattr(learner, "packed_logprobs", lambda *args: whole(*args) * torch.nan)
    return {}


def fail_to_sample(rank: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    if rank == 1:
        patch.setattr(LLM, "generate", fail)
    return {}


def judge_apart(rank: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(Undecided, "offset", 0.5 * rank)
    return {"task": Undecided(num_digits=1, heldout_share=0.3)}


def break_method(
    kind: type[EasyTask], method: str, num_calls: int, rank: int, patch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The second rank's task raises once a method was called so often."""
    whole, calls = getattr(kind, method), itertools.count()

    def broken(*args: Any) -> Any:
        if rank == 1 and next(calls) >= num_calls:
            raise KeyError("no answer")
        return whole(*args)

    patch.setattr(kind, method, broken)
    return {"task": kind(num_digits=1, heldout_share=0.3)}


# name -> (what differs from a good run, the error, its text)
Fault = tuple[Callable[[int, pytest.MonkeyPatch], dict[str, Any]] | dict[str, Any], type[Exception], str]
RAISED = r"^rank 1: the {}.* raised KeyError: 'no answer'"
REMOTE = {"name": "octavo-server", "url": "http://127.0.0.1:1"}
FAULTS: dict[str, Fault] = {
    "loss": (spoil_loss, NonFiniteError, r"the first tensor to go bad: rank 1: the loss itself \(nan\)"),
    "logprobs": (spoil_logprobs, ExactnessError, "the trainer on rank 1's logprob is nan"),
    "engine": (fail_to_sample, EngineError, "rank 1 could not sample its share of the prompts: RuntimeError: no room"),
    "verifier": (judge_apart, DataError, r"its reward is \S+ on rank 0 and \S+ on rank 1"),
    "evaluation": (partial(break_method, Undecided, "score", 0), DataError, RAISED.format(r"verifier .*, sample 0")),
    "scoring": (partial(break_method, Undecided, "score", 7), DataError, RAISED.format(r"verifier .*, sample 2")),
    "reset": (partial(break_method, TwoTurns, "reset", 6), DataError, RAISED.format(r"environment .*: reset")),
    "turn": (partial(break_method, TwoTurns, "step", 3), DataError, RAISED.format(r"environment .*: step")),
    "done": (end_apart, DataError, "the episode ended on rank 1 and goes on on rank 0"),
    "messages before": (partial(break_method, Chat, "messages", 0), DataError, RAISED.format("messages of prompt")),
    "messages of a step": (partial(break_method, Chat, "messages", 10), DataError, RAISED.format("messages")),
    "prompts": (partial(break_method, EasyTask, "prompts", 0), RuntimeError, r"^rank 1: KeyError: 'no answer'"),
    "remote": ({"engine": REMOTE}, ConfigError, "engine.name = 'octavo-server' is not supported on several ranks yet"),
    "lag": (INEXACT | {"asynchronous": {"max_policy_lag": 1}}, ConfigError, "asynchronous.max_policy_lag > 0 is not"),
    "history": (INEXACT | {"trainer": {"recipe": "delayed"}, "rollout": {"recipe": "bf16"}}, ConfigError, "'delayed'"),
    "scales": ({"rollout": {"kv_scales": "engine"}}, ConfigError, "rollout.kv_scales = 'engine' is not"),
    "cut": ({"rollout": {"tensor_parallel_size": 2, "keep_weights": False}}, ConfigError, "keep_weights = false with"),
    "cut apart": ({"rollout": {"tensor_parallel_size": 3}}, ConfigError, "must divide the number of ranks, got 3 for"),
    "blocks": (
        {"model": CUT | {"head_dim": 32}, "rollout": {"tensor_parallel_size": 2}, "trainer": {"recipe": "blockwise"}},
        ConfigError,
        "^rollout.tensor_parallel_size = 2 cannot cut the sampler, .*: 'blockwise' has blocks of 128, and layers.0",
    ),
    "uneven": ({"trainer": {"micro_batch_sequences": 0}}, ConfigError, "set trainer.micro_batch_sequences to (12|6), "),
}


def error_of(rank: int, folder: Path, num_ranks: int, name: str) -> str:
    """The text of the error that a run on these ranks ends with."""
    change, kind, _ = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        sections = {} if callable(change) else dict(change)
        keywords = change(rank, patch) if callable(change) else {}
        if not callable(change):
            patch.setattr(loop, "warm_policy", None)  # a config is refused before
        trainer = {"minibatches": 1, "micro_batch_sequences": 6, "steps": 1, **sections.pop("trainer", {})}
        config = config_of(folder, num_ranks, trainer=trainer, parallel=ORDERED, **sections)
        with pytest.raises(kind) as error:
            loop.run(config, progress=False, **{"task": EASY, **keywords})
    return str(error.value)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.largest)])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp(f"ranks-{request.param}")
    begun = config_of(folder / "begun", request.param)
    two_steps = begun.model_copy(update={"trainer": begun.trainer.model_copy(update={"steps": 2})})
    train("exact", two_steps.model_copy(update={"run": begun.run.model_copy(update={"checkpoint_every": 2})}))
    return folder, run_ranks(job, request.param, str(folder), request.param, list(VARIANTS))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "inexact"])
def test_a_run_on_ranks_has_the_bits_of_one_process(name: str, ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = ranks
    config = config_of(folder / f"one-{name}", len(found), name)
    whole = config.rollout.model_copy(update={"tensor_parallel_size": 1})
    expected = train(name, config.model_copy(update={"rollout": whole}))
    assert all(each[name] == expected for each in found)
    own, one = folder / name, folder / f"one-{name}"
    assert (own / "final" / "model.safetensors").read_bytes() == (one / "final" / "model.safetensors").read_bytes()
    assert (own / "transcripts.jsonl").read_bytes() == (one / "transcripts.jsonl").read_bytes()
    rows = read_metrics(own / "metrics.jsonl", StepRow)
    assert [summary(row) for row in rows] == expected["rows"] and len(rows) == 3
    for row in rows:
        assert row["mismatch/logprob_abs_diff_max"] == 0.0
        assert row["engine/sampling_s_max"] >= row["engine/sampling_s_min"] > 0.0
    assert rows[0]["actor/grad_norm"] > 0.5  # so that it was clipped


def test_the_log_says_how_the_sampler_is_cut(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in ranks[1]:
        (line,) = (text for text in found["said"] if "cut among" in text)  # of one of all variants
        assert line.startswith(
            f"the sampler is cut among 2 neighbouring ranks (groups: {len(ranks[1]) // 2}): 4 linears"
        )
        assert "gather: one GPU's bits forward" in line


def test_two_numerics_learn_on_ranks(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """Where a token's bits depend on what else is in the batch, all ranks still have the same run."""
    folder, found = ranks
    assert all(each["inexact"] == found[0]["inexact"] for each in found)
    rows = found[0]["inexact"]["rows"]
    assert len(rows) == 3 and all(row["mismatch/logprob_abs_diff_max"] > 0.0 < row["grad_norm"] for row in rows)
    assert len({row["loss"] for row in rows}) == 3
    assert rows == [summary(row) for row in read_metrics(folder / "inexact" / "metrics.jsonl", StepRow)]


def test_a_run_goes_on_with_another_number_of_ranks(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """Two steps in one process and the third on ranks; and the other way, after a signal to one of them."""
    folder, found = ranks
    expected = train("exact", config_of(folder / "one-resumed", len(found)))["rows"]
    assert [each["stopped_by"] for each in found] == ["SIGTERM"] * len(found)
    stopped = train("exact", config_of(folder / "stopped", len(found)))["rows"]
    for rows in (stopped, *(each["resumed"] for each in found)):
        # the evaluation of a last step has no counterpart
        assert [{**row, "eval/reward": None} for row in rows] == [{**row, "eval/reward": None} for row in expected]
    for name in ("stopped", "begun"):
        steps = sorted(path.name for path in (folder / name / "checkpoints").glob("step-*"))
        assert steps == ["step-00000002", "step-00000003"]
        ours, one = (path / "final" / "model.safetensors" for path in (folder / name, folder / "one-resumed"))
        assert ours.read_bytes() == one.read_bytes()


def command_of(folder: Path, **sections: Any) -> list[str]:
    """`octavo rl`'s, for torchrun."""
    file = folder / "config.toml"
    file.write_text(to_toml(config_of(folder / "run", 2, parallel=ORDERED, **sections)), encoding="utf-8")
    return ["--nproc-per-node", "2", "-m", "octavo", "rl", str(file)]


@SLOW
def test_the_command_under_torchrun_prints_once(tmp_path: Path) -> None:
    with cores_shared():
        ended = forks.torchrun(tmp_path, os.environ, *command_of(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("mean reward (held-out)") == 1 and ended.stderr.count("held-out reward before") == 1
    assert "Traceback" not in ended.stderr


@pytest.mark.largest
def test_the_command_under_torchrun_saves_when_it_is_stopped(tmp_path: Path) -> None:
    metrics = tmp_path / "run" / METRICS_FILE
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, *command_of(tmp_path, trainer={"steps": 10_000})]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with cores_shared(), subprocess.Popen(command, **pipes) as job:
        deadline = time.monotonic() + 120
        while not read_metrics(metrics, StepRow) and time.monotonic() < deadline:
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        out, errors = job.communicate(timeout=60)
    assert out.count("stopped by SIGTERM after step") == 1, errors
    assert job.returncode != 0
    found = open_store(config_of(tmp_path / "run", 2)).find_latest()
    assert found is not None and found.step == read_metrics(metrics, StepRow)[-1].step


def judged_by_rank(rank: int, folder: str) -> str:
    """Every group has something to learn from on the first rank, and none has on the second."""
    rewards = itertools.repeat(0.0) if rank else itertools.cycle((0.0, 1.0))
    config = config_of(Path(folder), 2, parallel=ORDERED, algorithm={"filter_groups": True, "max_gen_batches": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EasyTask, "score", lambda *_: next(rewards))
        with pytest.raises(OctavoError) as error:
            loop.run(config, progress=False, task=EASY)
    return f"{type(error.value).__name__}: {error.value}"


@SLOW
def test_a_verifier_of_two_minds_does_not_decide_how_much_is_sampled(tmp_path: Path) -> None:
    one, other = run_ranks(judged_by_rank, 2, str(tmp_path / "run"))
    assert one == other
    assert re.match(r"DataError: step 1, sequence \d+ .*: its reward is 1.0 on rank 0 and 0.0 on rank 1; it must", one)


@pytest.mark.parametrize("name", FAULTS)
def test_what_fails_on_one_rank_ends_all(name: str, ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    texts = [found["errors"][name] for found in ranks[1]]
    assert len(set(texts)) == 1
    pytest.raises(AssertionError, match=FAULTS[name][2]).matches(AssertionError(texts[0]))
