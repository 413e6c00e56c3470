"""Turns joined as tokens are the conversation that the chat template writes; a file's questions go through the loop."""

import json
from pathlib import Path

import pytest

from octavo.models.chat import DEFAULT_CHAT_TEMPLATE
from octavo.models.tokenizer import Tokenizer, train_bpe
from octavo.rl import loop
from octavo.rl.config import RLConfig
from octavo.rl.engines.protocol import Completion
from octavo.rl.episodes import play_episodes
from octavo.rl.tasks import Calculator
from octavo.rl.tasks.encode import encode_messages, encode_observation
from tests.rl.conftest import tiny_config


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    tokenizer = train_bpe(["User:\n12*34+5=\nAssistant:\n?12*34;"], 270)
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    return tokenizer


def test_joined_turns_are_the_templates_conversation(chat: Tokenizer) -> None:
    turns = ["?12*34;", "!413;"]

    def sample(prompts: object, room: int) -> list[Completion]:
        text = turns.pop(0)
        ids = [*chat.encode(text), chat.eos_id]
        return [Completion(text, ids, [-1.0] * len(ids), [0] * len(ids), "stop", None)]  # type: ignore[arg-type]

    task = Calculator(instructions=True)
    rollouts = play_episodes(sample, task, ["12*34+5="], chat, samples_per_prompt=1, max_tokens=99, max_len=999)
    assert rollouts.rewards.tolist() == [1.0]
    conversation = [
        *task.environment("12*34+5=").reset(),
        {"role": "assistant", "content": "?12*34;"},
        {"role": "user", "content": "408;"},
        {"role": "assistant", "content": "!413;"},
    ]
    whole = chat.encode(chat.render_chat(conversation).removesuffix("\n"))
    assert rollouts.sequences[0] == whole
    assert rollouts.prompt_lens[0] == len(encode_messages(conversation[:2], chat, 0, "prompt"))


def test_an_end_of_turn_is_written_once(chat: Tokenizer) -> None:
    assert chat.eos_id is not None
    after_end = encode_observation("408;", "user", chat, chat.eos_id)
    after_text = encode_observation("408;", "user", chat, chat.encode(";")[-1])
    assert after_text == [chat.eos_id, *after_end]
    assert chat.decode(after_end) == "\nUser:\n408;\nAssistant:\n"


def test_a_files_questions_go_through_the_loop(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}+0=", "answer": i}) for i in range(60)))
    plain = tiny_config(tmp_path / "run", trainer={"steps": 1}, eval={"num_prompts": 4}).model_dump(exclude_unset=True)
    task = {"name": "questions", "path": str(path), "verifier": "exact", "end": "\n", "heldout_share": 0.2}
    config = RLConfig(**{**plain, "task": task, "warmup": {"steps": 2, "check_prompts": 8, "batch_size": 8}})
    (row,) = loop.run(config, progress=False).history
    assert row["mismatch/logprob_abs_diff_max"] == 0.0
