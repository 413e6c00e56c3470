"""Supervised fine-tuning: lines are read or named, answers alone are targets, examples never cross, and it learns."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import sequence_logprobs
from octavo.errors import DataError
from octavo.models import Decoder, load_tokenizer
from octavo.train import train
from octavo.train.build import build_model
from octavo.train.config import DataSection, TrainConfig
from octavo.train.conversations import read_conversations
from octavo.train.data import IGNORED, Batch
from octavo.train.dataset import load_dataset
from octavo.train.examples import Examples, load_chat
from octavo.train.packing import PackSampler, fit, pack, validation_packs
from octavo.train.step import summed_loss
from octavo.train.tasks import make_tasks
from tests.assertions import assert_raises

from .conftest import MakeConfig

MakeData = Callable[..., DataSection]
SMALL = {"format": "chat", "path": "tasks", "num_tasks": 400, "seq_len": 48, "vocab_size": 300}


@pytest.fixture
def make_data(tmp_path: Path) -> MakeData:
    """A [data] section over lines written to a file."""

    def make(lines: list[object], **fields: object) -> DataSection:
        path = tmp_path / "chat.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        sizes = {"vocab_size": 280, "seq_len": 64, "validation_fraction": 0.2}
        return DataSection(**{"format": "chat", "path": str(path), "cache_dir": tmp_path / "cache", **sizes, **fields})

    return make


def turns(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def both(example: dict[str, object], count: int = 40) -> list[object]:
    """Enough different copies that both sides of the split have some."""
    return [json.loads(json.dumps(example).replace("#", str(i))) for i in range(count)]


def make_examples(*marks: str) -> Examples:
    """Examples whose tokens count up from 1; "a" marks an answer's token, "." another."""
    flat = "".join(marks)
    tokens, answers = np.arange(1, len(flat) + 1, dtype=np.uint16), np.array([c == "a" for c in flat], dtype=np.uint8)
    return Examples(tokens, answers, np.cumsum([0, *map(len, marks)]))


# Reading


def test_both_forms_are_read(make_data: MakeData) -> None:
    data = make_data([turns("q", "a"), "\n", {"prompt": "p", "completion": "c", "id": 7}])
    first, second = read_conversations(data.path, data)
    assert [m["content"] for m in first.messages] == ["q", "a"]
    assert first.counted == (False, True)
    assert (second.prompt, second.completion) == ("p", "c")


def test_weight_0_is_no_target(make_data: MakeData) -> None:
    record = turns("q", "a", "q", "b")
    record["messages"][1]["weight"] = 0  # type: ignore[index]
    data = make_data([record])
    (conversation,) = read_conversations(data.path, data)
    assert conversation.counted == (False, False, False, True)
    assert all("weight" not in message for message in conversation.messages)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken\n", "not JSON"),
        ("[1]\n", "got a list"),
        ({"text": "t"}, r"must be either .*got the keys \['text'\]"),
        ({**turns("q", "a"), "prompt": "p"}, "must be either"),
        ({"prompts": "p", "completion": "c"}, r"the line has no key 'prompt'; its keys are .*'prompts'"),
        ({"prompt": "p", "completion": None}, "completion must be text, got None"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hi"]}, r"messages\[0\] must have role and content"),
        ({"messages": [{"role": "helper", "content": "a"}]}, r"messages\[0\]\.role must be one of .*'helper'"),
        ({"messages": [{"role": "user", "contents": "a"}]}, r"messages\[0\] has no key 'content'; .*'contents'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\[0\]\.content must be text"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, r"messages\[0\]\.weight must be 0"),
        ({**turns("q", "a"), "tools": [{}]}, "has 'tools'"),
    ],
)
def test_bad_lines_are_named(make_data: MakeData, line: object, message: str) -> None:
    data = make_data([turns("q", "a"), line])
    assert_raises(DataError, rf"chat\.jsonl, line 2: .*{message}", list, read_conversations(data.path, data))


def test_bad_content_is_named_while_tokenizing(make_data: MakeData) -> None:
    lines = [*both(turns("q #", "a")), turns("<|endoftext|>", "a")]
    data = make_data(lines, validation_path="tasks", num_tasks=9)
    assert_raises(DataError, r"chat\.jsonl, line 41: the user's content spells the special token", load_chat, data)


def test_places_that_hold_no_conversation(make_data: MakeData, tmp_path: Path) -> None:
    assert_raises(DataError, "no such file or directory", load_chat, make_data([], path="gone.jsonl"))
    (tmp_path / "text.txt").write_text("hi")
    assert_raises(DataError, r"read from \.jsonl files", load_chat, make_data([], path=str(tmp_path / "text.txt")))
    assert_raises(DataError, "holds no conversation", load_chat, make_data([]))


# Targets


def test_answers_alone_are_targets(make_data: MakeData) -> None:
    chat = load_chat(make_data(both(turns("what is #", "it is #", "and again", "# it is"))))
    fitted = fit(chat.train, 64, "error")
    inputs, targets = fitted.read(0)
    told = chat.tokenizer.decode(targets[targets != IGNORED], skip_special_tokens=False)
    number = chat.tokenizer.decode(inputs).split("what is ")[1].split("\n")[0]
    assert told == f"it is {number}<|endoftext|>{number} it is<|endoftext|>"
    for place in np.flatnonzero(targets != IGNORED):
        assert place + 1 == len(inputs) or targets[place] == inputs[place + 1]


def test_completion_ends_with_the_end_of_sequence(make_data: MakeData) -> None:
    chat = load_chat(make_data(both({"prompt": "ask # ", "completion": "tell #"})))
    _, targets = fit(chat.train, 64, "error").read(0)
    told = targets[targets != IGNORED]
    assert told[-1] == chat.tokenizer.eos_id
    assert chat.tokenizer.decode(told).startswith("tell ")


def test_without_answers_is_left_out_and_counted(make_data: MakeData) -> None:
    empty = [turns("only a question"), turns("q", " "), {"prompt": "p", "completion": ""}]
    chat = load_chat(make_data([*both(turns("q #", "a #")), *empty]))
    assert chat.num_empty == 3
    assert len(chat.train) + len(chat.validation) == 40
    data = make_data(empty[:2], validation_path="tasks", num_tasks=9)
    assert_raises(DataError, r"gives no train example with an answer \(2 without one\)", load_chat, data)


def test_template_of_ones_own_and_cache(make_data: MakeData, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    data = make_data(both(turns("q #", "a #")), chat_template=str(file))
    chat = load_chat(data)
    assert chat.tokenizer.decode(chat.train.tokens[: chat.train.starts[1]]).startswith("[user]q")
    assert chat.tokenizer.chat_template == file.read_text()
    assert load_chat(data).fingerprint == chat.fingerprint
    assert load_chat(make_data(both(turns("q #", "a #")))).fingerprint != chat.fingerprint


# Packing


def test_long_examples() -> None:
    examples = make_examples("..aa", "......aa", "..aa....", ".a")
    skipped = fit(examples, 4, "skip")
    assert (skipped.indices.tolist(), skipped.num_skipped, skipped.num_cut, skipped.num_empty) == ([0, 3], 2, 0, 0)
    cut = fit(examples, 4, "cut")
    assert (cut.indices.tolist(), cut.num_skipped, cut.num_cut, cut.num_empty) == ([0, 2, 3], 0, 1, 1)
    assert cut.lengths.tolist() == [3, 4, 1]
    assert cut.read(1)[1].tolist() == [IGNORED, 15, 16, IGNORED]
    with pytest.raises(DataError, match=r"2 of 4 examples are longer than data\.seq_len=4, the longest has 8 tokens"):
        fit(examples, 4, "error")
    assert_raises(DataError, "none of 4 examples fits", fit, make_examples("....", "....", "....", "...."), 4, "skip")


def test_packs_hold_whole_examples() -> None:
    lengths = np.array([3, 4, 5, 2, 8])
    packs = pack(lengths, np.array([0, 1, 2, 3, 4]), 8)
    assert [p.tolist() for p in packs] == [[0, 1], [2, 3], [4]]
    batch = next(validation_packs(fit(make_examples(".aa", ".a", "..aaaa"), 5, "error"), 5, 2))
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 8]
    assert batch.input_ids.tolist() == [1, 2, 4, 6, 7, 8, 9, 10]
    assert batch.targets.tolist() == [2, 3, 5, IGNORED, 8, 9, 10, 11]
    assert batch.num_targets == 7


def test_every_example_once_an_epoch_whatever_the_step_order() -> None:
    fitted = fit(make_examples(*(["..aa", ".aaaa", "..a"] * 20)), 12, "error")

    def firsts(steps: list[int]) -> list[list[int]]:
        sampler = PackSampler(fitted, 12, 2, 1, seed=3)
        made = {step: sampler.batches(step) for step in steps}
        return [[int(b.input_ids[i]) for b in made[step] for i in b.cu_seqlens[:-1].tolist()] for step in sorted(made)]

    forward, backward = firsts(list(range(30))), firsts(list(reversed(range(30))))
    assert forward == backward
    seen = [start for step in forward for start in step]
    assert len(set(seen[:60])) == 60
    assert sorted(seen[60:120]) == sorted(seen[:60])
    assert seen[60:120] != seen[:60]


# The loss


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Batch]:
    """A model in fp32, and a batch of a few conversations."""
    section = {**SMALL, "cache_dir": tmp_path_factory.mktemp("cache"), "batch_size": 1}
    model = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = TrainConfig(data=section, model=model, precision={"recipe": "bf16", "dtype": "fp32"})
    dataset = load_dataset(config)
    model = build_model(config, dataset.tokenizer.vocab_size, dataset.tokenizer.eos_id, torch.device("cpu"))
    return model, dataset.batches(0)[0]


def gradients(model: Decoder, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    loss = summed_loss(model, batch)
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relabelled(batch: Batch, place: int, label: int) -> Batch:
    targets = batch.targets.clone()
    targets[place] = label
    return Batch(batch.input_ids, targets, batch.cu_seqlens, batch.num_targets)


def test_loss_is_that_of_the_answers(learner: tuple[Decoder, Batch]) -> None:
    model, batch = learner
    bounds = batch.cu_seqlens.tolist()
    total = 0.0
    for start, end in itertools.pairwise(bounds):
        counts = batch.targets[start:end] != IGNORED
        # the whole example, alone: the token after its last input is its last target
        sequence = [*batch.input_ids[start:end].tolist(), int(batch.targets[end - 1])]
        total -= sequence_logprobs(model, [sequence])[0][counts].sum().item()
    assert len(bounds) > 2
    assert summed_loss(model, batch).item() == pytest.approx(total, rel=1e-5)


def test_a_prompts_label_changes_nothing_and_an_answers_does(learner: tuple[Decoder, Batch]) -> None:
    model, batch = learner
    loss, grads = gradients(model, batch)
    answer = int((batch.targets != IGNORED).nonzero()[0])
    other = (int(batch.targets[answer]) + 1) % model.config.vocab_size
    changed, changed_grads = gradients(model, relabelled(batch, answer, other))
    assert changed != loss
    assert any(not torch.equal(grads[name], changed_grads[name]) for name in grads)
    # a prompt's position has no label at all: whatever follows it in the text, its logits have no gradient
    hidden = torch.zeros(len(batch.targets), model.config.hidden_size)

    def keep(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: hidden.copy_(grad))

    handle = model.norm.register_forward_hook(keep)
    gradients(model, batch)
    handle.remove()
    assert torch.equal(hidden.abs().sum(dim=1) > 0, batch.targets != IGNORED)


def test_examples_do_not_see_each_other(learner: tuple[Decoder, Batch]) -> None:
    model, batch = learner
    bounds = batch.cu_seqlens.tolist()
    first = slice(0, bounds[1])
    alone = Batch(batch.input_ids[first], batch.targets[first], torch.tensor([0, bounds[1]]), 1)
    changed, targets = batch.input_ids.clone(), batch.targets.clone()
    changed[bounds[1] :], targets[bounds[1] :] = 5, IGNORED
    together = Batch(changed, targets, batch.cu_seqlens, 1)
    assert summed_loss(model, together).item() == pytest.approx(summed_loss(model, alone).item(), rel=1e-6)


# Whole runs


def test_tasks_are_the_same_everywhere() -> None:
    made = list(make_tasks(200))
    assert made[:100] == list(make_tasks(100))
    assert all([m["role"] for m in json.loads(line)["messages"]][:2] == ["user", "assistant"] for line in made)
    assert len({len(json.loads(line)["messages"]) for line in made}) > 1


def test_run_learns_says_what_it_left_out_and_resumes(make_config, tmp_path, capsys):
    data = {**SMALL, "cache_dir": tmp_path / "cache", "long_examples": "skip", "seq_len": 28}
    sections = {"data": data, "optimizer": {"lr": 1e-2}, "metrics": {"eval_every": 8}, "schedule": {"kind": "constant"}}
    result = train(make_config(**sections, run={"steps": 8}))
    said = " ".join(capsys.readouterr().err.split())
    assert "of their tokens in answers" in said
    assert "examples longer than data.seq_len=28 left out" in said
    assert result.val_loss is not None
    assert result.val_loss < result.rows[0].loss - 1.0
    saved = load_tokenizer(result.checkpoint / "model")
    assert saved.chat_template == result.tokenizer.chat_template is not None
    again = train(make_config(**sections, run={"steps": 9}), progress=False)
    whole = train(make_config("whole", **sections, run={"steps": 9}), progress=False)
    assert [row.loss for row in again.rows] == [row.loss for row in whole.rows]


def test_micro_batches_are_of_so_many_packs(make_config: MakeConfig, tmp_path: Path) -> None:
    first, second = load_dataset(make_config(data={**SMALL, "cache_dir": tmp_path / "cache"})).batches(0)
    assert all(0 < len(batch.input_ids) <= 2 * 48 for batch in (first, second))
