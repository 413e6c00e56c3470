"""The whole loop over stand-ins of vLLM and SGLang: it learns, corrects, and stops at the first wrong logprobs."""

from pathlib import Path
from typing import Any

import pytest

from octavo.rl import loop
from octavo.rl.config import RLConfig
from octavo.rl.engines import EngineError, EngineSection, ProbeError, StaleVersionError
from octavo.rl.loop import build_policy
from tests.integrations.rollout.conftest import KINDS, block_config
from tests.integrations.rollout.stand_in import StandIn
from tests.rl.test_loop import EASY, weights_of

pytestmark = pytest.mark.slow


def run(config: RLConfig, kind: str, folder: Path, server: StandIn, policy: Any) -> loop.RLResult:
    section = EngineSection(name=kind, url=server.url, weights_dir=folder / "shared")  # type: ignore[arg-type]
    config = config.model_copy(update={"engine": section})
    return loop.run(config, model=policy[0], tokenizer=policy[1], task=EASY, progress=False)


def make(folder: Path, kind: str, **sections: Any) -> tuple[RLConfig, Any, StandIn]:
    config = block_config(
        folder,
        exact=False,
        correction={"kind": "token_tis"},
        **{"trainer": {"recipe": "bf16", "steps": 3}, "rollout": {"recipe": "blockwise", "max_tokens": 6}, **sections},
    )
    policy = build_policy(config, EASY)
    return config, policy, KINDS[kind][1](policy[1])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_it_learns_and_corrects(tmp_path: Path, kind: str) -> None:
    config, policy, server = make(tmp_path, kind)
    before = weights_of(policy[0])
    with server:
        result = run(config, kind, tmp_path, server, policy)
    for row in result.history:
        assert 0.0 < row["rollout_corr/k3_kl"] < 0.1
        assert row["mismatch/policy_lag_max"] == 0.0
        assert row["engine/num_preemptions"] > 0
    assert any(not (before[name] == param).all() for name, param in policy[0].named_parameters())
    assert not [path for path in (tmp_path / "shared").iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_that_dies_or_grows_old_stops_the_run(tmp_path: Path, kind: str) -> None:
    generate = {"vllm": "POST /v1/completions", "sglang": "POST /generate"}[kind]
    for name, error in (("dies", EngineError), ("grows old", StaleVersionError)):
        config, policy, server = make(tmp_path / name, kind)

        def fail(server: Any = server, name: str = name, generate: str = generate) -> None:
            if server.calls.count(generate) == 2:
                if name == "dies":
                    server.die()
                server.version = "default"

        server.before[generate] = fail
        with server, pytest.raises(error):
            run(config, kind, tmp_path / name, server, policy)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_logprobs_of_temperature_1_stop_the_run(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does without --logprobs-mode processed_logprobs."""
    import octavo.rl.engines.probe as probe
    from octavo.rl.learner import score_rollouts

    rollout = {"recipe": "blockwise", "max_tokens": 6, "temperature": 0.5}
    config, policy, server = make(tmp_path, kind, rollout=rollout)
    check = probe.LogprobProbe.check

    def as_raw(self: probe.LogprobProbe, rollouts: Any) -> float:
        rollouts.rollout_logprobs.copy_(score_rollouts(self._model, rollouts, 1.0, 0))
        return check(self, rollouts)

    monkeypatch.setattr(probe.LogprobProbe, "check", as_raw)
    with server, pytest.raises(ProbeError, match="temperature on one side"):
        run(config, kind, tmp_path, server, policy)
