"""A run's prompts at its border: small held-out sets, and prompts that leave a response no room, before any work."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, DataError
from octavo.rl import loop
from octavo.rl.checkpoint import FinishedRunError
from octavo.rl.config import EvalSection, RLConfig, TrainerSection
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.evaluate import Evaluator
from octavo.rl.progress import RLProgress
from octavo.rl.prompts import check_context, check_known_prompts, draw_heldout, prompts_of_step, with_steps
from octavo.rl.rollout import generate_rollouts
from octavo.rl.tasks import Arithmetic, Calculator, Questions
from octavo.serve import LLM
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import EASY, EasyTask


def questions(directory: Path, texts: list[str], **fields: Any) -> Questions:
    path = directory / "q.jsonl"
    path.write_text("\n".join(json.dumps({"question": text, "answer": 1}) for text in texts))
    return Questions(path, **{"verifier": "exact", "end": "\n", **fields})


def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.rl.policy.warm_up", lambda *_, **__: pytest.fail("a warm start began"))
    monkeypatch.setattr(LLM, "generate", lambda *_, **__: pytest.fail("something was sampled"))


def test_a_small_heldout_set_is_taken_whole_where_no_number_was_set(tmp_path: Path) -> None:
    task = questions(tmp_path, [f"{i}+0=" for i in range(40)], heldout_share=0.3)
    found = draw_heldout(EvalSection(), task)
    assert 5 < len(found) < 20
    assert sorted(found) == sorted(set(task.all_prompts()) - set(task.prompts("train", 40 - len(found), 0)))
    drawn = draw_heldout(EvalSection(), EASY)
    every = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    assert sorted(drawn) == sorted(prompt for prompt in every if EASY.split_of(prompt) == "heldout")
    assert len(draw_heldout(EvalSection(), Arithmetic())) == 256


def test_a_small_heldout_set_is_an_error_where_a_number_was_set(tmp_path: Path) -> None:
    task = questions(tmp_path, ["1", "2", "3"], heldout_share=0.999)
    for number in (256, 4):  # the default's own number too, once it is said
        with pytest.raises(ConfigError, match=f"has 3, fewer than the {number} .*num_prompts, which is {number}"):
            draw_heldout(EvalSection(num_prompts=number), task)
    assert sorted(draw_heldout(EvalSection(num_prompts=3), task)) == ["1", "2", "3"]
    with pytest.raises(ConfigError, match=r"has 0, .* an evaluation needs at least one"):
        draw_heldout(EvalSection(), questions(tmp_path, ["1"], heldout_share=1e-9))


def test_a_task_of_ones_own_that_gives_fewer_without_an_error() -> None:
    class Short(EasyTask):
        def prompts(self, split: str, n: int, seed: int) -> list[str]:
            return super().prompts(split, min(n, 5), seed)

    task = Short(num_digits=1, heldout_share=0.3)
    assert len(draw_heldout(EvalSection(), task)) == 5
    with pytest.raises(ConfigError, match=r"gave 5 held-out prompts, of 9 asked for; lower eval\.num_prompts"):
        draw_heldout(EvalSection(num_prompts=9), task)


def test_epochs_pass_over_all_prompts_in_whole_steps(tmp_path: Path) -> None:
    task = questions(tmp_path, [f"{i}+0=" for i in range(11)], heldout_share=1e-9)
    config = with_steps(RLConfig(trainer={"epochs": 2}, rollout={"prompts_per_step": 4}), task)
    assert config.trainer.steps == 4  # 2 steps of 4 prompts an epoch, and 3 prompts are left over in each
    steps = [prompts_of_step(config, task, step, lambda n: 100 + n) for step in range(1, 5)]
    assert [len(set(steps[i] + steps[i + 1])) for i in (0, 2)] == [8, 8]
    assert steps[:2] != steps[2:]
    drawn = config.model_copy(update={"trainer": TrainerSection()})
    assert prompts_of_step(drawn, task, 3, lambda n: 100 + n) == task.prompts("train", 4, 103)


def test_epochs_and_steps_end_a_run_whichever_comes_first(tmp_path: Path) -> None:
    task = questions(tmp_path, [f"{i}+0=" for i in range(8)], heldout_share=1e-9)
    for steps, expected in ((3, 3), (9, 4)):
        config = RLConfig(trainer={"epochs": 2, "steps": steps}, rollout={"prompts_per_step": 4})
        assert with_steps(config, task).trainer.steps == expected
    with pytest.raises(ConfigError, match="the train split has 8 prompts, fewer than the 32 of a step"):
        with_steps(RLConfig(trainer={"epochs": 1}), task)
    with pytest.raises(ConfigError, match=r"task 'arithmetic' makes its own; give trainer\.steps"):
        with_steps(RLConfig(trainer={"epochs": 1}), Arithmetic())


def test_a_run_of_epochs_without_long_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question is longer than max_prompt_tokens: it is left out and said, and each other one is sampled once."""
    said: list[str] = []
    monkeypatch.setattr(RLProgress, "say", lambda self, text: said.append(text))
    texts = [*(f"{i}+0=" for i in range(13)), "1" * 9]
    fields = {"heldout_share": 0.3, "max_prompt_tokens": 8, "end": "\n", "verifier": "exact"}
    task = questions(tmp_path, texts, drop_long_prompts=True, **fields)
    sampled: list[str] = []
    score = task.score
    monkeypatch.setattr(task, "score", lambda prompt, text: [sampled.append(prompt), score(prompt, text)][1])
    config = tiny_config(tmp_path / "run", run={"checkpoint_every": 1}).model_copy(update={"eval": EvalSection()})
    config = config.model_copy(update={"trainer": TrainerSection(epochs=1, minibatches=1)})
    result = loop.run(config, task=task, progress=False)
    assert "note: 1 of 14 prompts have more than 8 tokens and are left out" in said
    assert "1" * 9 not in sampled
    assert len(result.history) == task.num_prompts("train") // 4 == 2
    counts = Counter(prompt for prompt in sampled if prompt not in draw_heldout(EvalSection(), task))
    assert set(counts.values()) == {4} and len(counts) == 8
    for given, keys in (
        ({"epochs": 1}, "trainer.epochs"),
        ({"epochs": 1, "steps": 9}, "trainer.epochs"),
        ({"epochs": 2, "steps": 2}, "trainer.steps"),
        ({"epochs": 1, "steps": 2}, "trainer.epochs and trainer.steps"),
    ):
        config = config.model_copy(update={"trainer": TrainerSection(**given, minibatches=1)})
        with pytest.raises(FinishedRunError, match=f"already at step 2 of 2, .* raise {keys}, or --no-resume"):
            loop.run(config, task=task, progress=False)
    config = config.model_copy(update={"trainer": TrainerSection(epochs=2, steps=1, minibatches=1)})
    with pytest.raises(ConfigError, match=r"is at step 2, and the run ends at step 1; raise trainer\.steps, or start"):
        loop.run(config, task=task, progress=False)
    with pytest.raises(DataError, match=r"has 9 tokens, more than task\.max_prompt_tokens = 8"):
        loop.run(config, task=questions(tmp_path, texts, **fields), progress=False, resume=False)


def test_the_progress_says_how_many_prompts_there_are(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(RLProgress, "say", lambda self, text: said.append(text))
    config = tiny_config(tmp_path, trainer={"steps": 1}).model_copy(update={"eval": EvalSection()})
    loop.run(config, model=policy[0], tokenizer=policy[1], task=EASY, progress=False)
    number = len(draw_heldout(EvalSection(), EASY))
    (line,) = [text for text in said if text.startswith("held-out reward before")]
    assert line.endswith(f"({number} prompts: all that the held-out set has; bf16, greedy)")


def test_the_rule_names_the_longest_prompt_and_what_to_lower() -> None:
    check_context(["a", "bcd"], [1, 3], max_tokens=7, context=10)
    with pytest.raises(ConfigError) as caught:
        check_context(["a", "bcd"], [1, 3], max_tokens=8, context=10)
    got = ("rollout.max_tokens = 8", "longest prompt has 3 tokens ('bcd')", "together may have 10")
    for words in (*got, "lower rollout.max_tokens to at most 7", "model.max_position_embeddings"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="it leaves no room for a response"):
        check_context(["bcd"], [10], max_tokens=1, context=10)


def test_too_long_a_response_is_refused_before_the_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_work(monkeypatch)
    config = tiny_config(tmp_path, rollout={"max_tokens": 253}, warmup={"steps": 5})
    with pytest.raises(ConfigError, match=r"longest prompt has 4 tokens .* may have 256 .* at most 252"):
        loop.run(config, task=EASY, progress=False)


def test_a_files_longest_question_is_found_before_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in no batch of this run, for there is one long question among many."""
    no_work(monkeypatch)
    task = questions(tmp_path, [*(f"{i}+0=" for i in range(200)), "1" * 60], heldout_share=0.1)
    config = tiny_config(tmp_path, rollout={"max_tokens": 200}, warmup={"steps": 5}, trainer={"steps": 1})
    with pytest.raises(ConfigError, match=r"longest prompt has 60 tokens .* at most 196"):
        loop.run(config, task=task, progress=False)


def test_a_prompt_that_is_drawn_later_is_refused_before_it_is_sampled(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = policy
    engine = EmbeddedEngine(LLM(model, tokenizer=tokenizer, max_num_seqs=4))
    context = model.config.max_position_embeddings
    no_work(monkeypatch)
    for task, prompts in ((EASY, ["1+1=", "1" * 20]), (Calculator(), ["1+1=", "1" * 20])):
        with pytest.raises(ConfigError, match=f"longest prompt has 20 tokens .* may have {context}"):
            generate_rollouts(engine, task, prompts, samples_per_prompt=2, max_tokens=context - 19, temperature=1.0)
    evaluator = Evaluator(model, tokenizer, EASY, max_tokens=context - 3, max_num_seqs=4)
    with pytest.raises(ConfigError, match=f"at most {context - 4}"):
        evaluator.mean_reward(["1+1="])


def test_a_response_may_fill_the_context_to_its_end(policy: Policy) -> None:
    model, tokenizer = policy
    engine = EmbeddedEngine(LLM(model, tokenizer=tokenizer, max_num_seqs=4))
    room = model.config.max_position_embeddings - 4
    check_known_prompts(EASY, ["1+1="], tokenizer, room, model.config.max_position_embeddings)
    rollouts = generate_rollouts(engine, EASY, ["1+1="], samples_per_prompt=2, max_tokens=room, temperature=1.0)
    assert all(n == room or done for n, done in zip(rollouts.response_lens, rollouts.is_finished, strict=True))
