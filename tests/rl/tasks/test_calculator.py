"""The calculator environment: what it says, and that its text is in no loss, and that exact mode is exact."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, DataError
from octavo.models import Decoder, Tokenizer, sequence_logprobs
from octavo.models.tokenizer import char_tokenizer
from octavo.rl import loop
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.protocol import Completion
from octavo.rl.episodes import play_episodes
from octavo.rl.learner import response_logprobs
from octavo.rl.loop import build_policy
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.tasks import Calculator, StepResult
from octavo.rl.tasks.calculator import INSTRUCTIONS
from octavo.serve import LLM
from tests.rl.conftest import tiny_config

TASK = Calculator(call_cost=0.25)
PROMPT = "12*34+5="


class Script:
    """A policy that writes what it is told, turn by turn."""

    def __init__(self, tokenizer: Tokenizer, *turns: str, stop: str = ";") -> None:
        self.tokenizer, self.turns, self.stop = tokenizer, list(turns), stop
        self.seen: list[list[int]] = []

    def __call__(self, prompt_ids: Any, room: int) -> list[Completion]:
        text = self.turns.pop(0)
        self.seen += prompt_ids
        ids = self.tokenizer.encode(text)[:room]
        reason = "stop" if text.endswith(self.stop) and len(ids) == len(self.tokenizer.encode(text)) else "length"
        stop = self.stop if reason == "stop" else None
        turn = Completion(text.removesuffix(self.stop), ids, [-0.5] * len(ids), [7] * len(ids), reason, stop)
        return [turn for _ in prompt_ids]


def play(*turns: str, task: Any = TASK, prompt: str = PROMPT, max_tokens: int = 100, max_len: int = 200) -> Rollouts:
    tokenizer = char_tokenizer(task.alphabet)
    limits = {"max_tokens": max_tokens, "max_len": max_len}
    return play_episodes(Script(tokenizer, *turns), task, [prompt], tokenizer, samples_per_prompt=1, **limits)


def test_the_tool_answers_and_its_text_is_marked() -> None:
    rollouts = play("?12*34;", "?408+5;", "!413;")
    assert rollouts.completions == ["?12*34;408;?408+5;413;!413;"]
    assert rollouts.rewards.tolist() == [1.0 - 2 * 0.25]
    assert rollouts.is_finished.tolist() == [True]
    tokenizer = char_tokenizer(TASK.alphabet)
    assert tokenizer.decode(rollouts.sequences[0]) == PROMPT + rollouts.completions[0]
    after = rollouts.sequences[0][rollouts.prompt_lens[0] :]
    sampled = tokenizer.decode([i for i, mine in zip(after, rollouts.is_sampled[0], strict=True) if mine])
    assert sampled == "?12*34;?408+5;!413;"
    assert rollouts.response_lens == [len(sampled)]
    assert rollouts.rollout_logprobs.shape == rollouts.weight_versions.shape == (len(sampled),)


@pytest.mark.parametrize(
    ("turns", "reward", "finished", "text"),
    [
        (("!413;",), 1.0, True, "!413;"),
        (("!414;",), 0.0, True, "!414;"),
        (("413;",), 0.0, True, "413;"),
        (("?1**2;", "!413;"), 0.75, True, "?1**2;error;!413;"),
        (("?12*34;",) * 4, -1.0, False, "?12*34;408;" * 4),  # max_turns
    ],
)
def test_episodes(turns: tuple[str, ...], reward: float, finished: bool, text: str) -> None:
    rollouts = play(*turns)
    assert rollouts.rewards.tolist() == [reward]
    assert rollouts.is_finished.tolist() == [finished]
    assert rollouts.completions == [text]
    assert len(rollouts.is_sampled[0]) == len(rollouts.sequences[0]) - rollouts.prompt_lens[0]
    assert rollouts.is_sampled[0][-1]  # what the environment says last teaches nothing and is cut off


def test_an_episode_ends_at_its_limits() -> None:
    cut = play("?12*34;", "?408+5;", max_tokens=10)
    assert cut.completions == ["?12*34;408;?40"]
    assert cut.response_lens == [10]
    assert not cut.is_finished[0]
    # 8 tokens of the problem, 7 of a turn, 4 of the tool: 3 are left of the context, 7 of max_tokens
    assert len(play("?12*34;", "?408+5;", max_tokens=14, max_len=22).sequences[0]) == 22
    with pytest.raises(ConfigError, match=r"the longest prompt has 8 tokens \('12\*34\+5='\)"):
        play("!413;", max_tokens=15, max_len=22)


def test_instructions_are_a_message_of_their_own() -> None:
    messages = Calculator(instructions=True).environment(PROMPT).reset()
    assert [m["content"] for m in messages] == [INSTRUCTIONS, PROMPT]


def test_examples_are_right_turns() -> None:
    turns = TASK.examples("train", 9, seed=1)
    assert len(turns) == 9
    for i in range(0, 9, 3):
        prompt = turns[i][0]
        rollouts = play(*(completion for _, completion in turns[i : i + 3]), prompt=prompt)
        assert rollouts.rewards.tolist() == [0.5]
        assert turns[i + 2][0] + turns[i + 2][1] == prompt + rollouts.completions[0]


class Broken(Calculator):
    """An environment with a fault."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def environment(self, prompt: str) -> Any:
        result = self.result
        inner = super().environment(prompt)

        class Faulty:
            def reset(self) -> Any:
                return inner.reset()

            def step(self, text: str) -> Any:
                if isinstance(result, Exception):
                    raise result
                return result

        return Faulty()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (KeyError("tool"), r"task 'calculator', sample 0 \(prompt '12\*34\+5='\), turn '!1;': step raised KeyError"),
        (StepResult(reward=float("nan"), done=True), "gave the reward nan"),
        (StepResult(reward="high", done=True), "gave 'high'; a reward must be a number"),  # type: ignore[arg-type]
        (1.0, "step gave a float, not an octavo.rl.tasks.StepResult"),
    ],
)
def test_a_faulty_environment_is_named(result: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        play("!1;", task=Broken(result))


def test_a_reset_that_raises_is_named_with_its_sample() -> None:
    class NoReset(Calculator):
        def environment(self, prompt: str) -> Any:
            raise OSError("no sandbox")

    with pytest.raises(DataError, match=r"sample 0 .* reset raised OSError: no sandbox"):
        play("!1;", task=NoReset())


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Any, Decoder, Tokenizer]:
    config = tiny_config(
        tmp_path,
        task={"name": "calculator"},
        trainer={"steps": 2},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 8, "max_tokens": 12},
    )
    model, tokenizer = build_policy(config, Eager())
    return config, model, tokenizer


class Eager(Calculator):
    """Answers everything that the policy ends, so that an untrained one plays several turns; rewards digits."""

    def environment(self, prompt: str) -> Any:
        class Chatty:
            def reset(self) -> Any:
                return [{"role": "user", "content": prompt}]

            def step(self, text: str) -> StepResult:
                return StepResult("408;", reward=sum(c.isdigit() for c in text) / 4)

        return Chatty()


def test_the_environments_tokens_are_in_no_loss(toy: tuple[Any, Decoder, Tokenizer]) -> None:
    _, model, tokenizer = toy
    engine = EmbeddedEngine(LLM(model, tokenizer=tokenizer, seed=0))
    prompts = ["1*2+3=", "4*5+6="]
    rollouts = generate_rollouts(engine, Eager(), prompts, samples_per_prompt=12, max_tokens=12, temperature=1.0)
    assert any(not all(mask) for mask in rollouts.is_sampled)
    found = response_logprobs(model, rollouts, 1.0)
    expected = []
    for ids, n, mask in zip(rollouts.sequences, rollouts.prompt_lens, rollouts.is_sampled, strict=True):
        (logprobs,) = sequence_logprobs(model, [ids], 1.0)
        expected += [x for x, mine in zip(logprobs[n - 1 :].tolist(), mask, strict=True) if mine]
    torch.testing.assert_close(found.detach(), torch.tensor(expected), atol=1e-5, rtol=0)
    assert found.shape == rollouts.rollout_logprobs.shape
    # only what was sampled has a gradient to the logits: an observation's own logprob is not among the terms
    half = rollouts.shuffled(3).part(0, 12)
    assert half.num_tokens == sum(sum(mask) for mask in half.is_sampled)
    assert response_logprobs(model, half, 1.0).shape == (half.num_tokens,)


def test_several_turns_are_exact_in_the_loop(toy: tuple[Any, Decoder, Tokenizer]) -> None:
    config, model, tokenizer = toy
    result = loop.run(config, model=model, tokenizer=tokenizer, task=Eager(), progress=False)
    assert any(not all(mask) for mask in result.last_rollouts.is_sampled)
    for row in result.history:
        assert row["mismatch/logprob_abs_diff_max"] == 0.0
        assert row["actor/grad_norm"] > 0


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="calculator needs num_digits >= 1"):
        Calculator(max_turns=0)
    with pytest.raises(ConfigError, match="this calculator task has about"):
        Calculator(num_digits=1).prompts("heldout", 300, 0)
