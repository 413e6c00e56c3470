"""verl's keys that octavo does not map: what it ignores with a note, and what it takes at its own values alone."""

import importlib.util
import re
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.integrations.config import read_verl
from octavo.integrations.config.document import read_document
from octavo.integrations.config.verl_ignored import IGNORED
from octavo.integrations.config.verl_keys import (
    ACTOR,
    CORRECTION,
    GROUPED,
    KEYS,
    MODEL,
    OPTIM,
    REF,
    ROLLOUT,
    TRANSFORMER,
)
from octavo.integrations.config.verl_refused import REFUSED, SAME_AS
from octavo.rl.config import RLConfig

NEEDED = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")
VERL = importlib.util.find_spec("verl")  # where it is installed, its own files are read
SHIPPED = sorted(Path(VERL.origin).parent.glob("trainer/config/_generated_ppo_*.yaml")) if VERL and VERL.origin else []
# whatever the tables say: values on which results depend, and some at which octavo does the same
DECISIVE = f"""{ACTOR}.fsdp_config.dtype=float16 {ACTOR}.fsdp_config.model_dtype=bf16 {ACTOR}.megatron.qat.enable=true
{REF}.megatron.dtype=float16 {REF}.model.path=/m {REF}.router_replay.mode=R3 {TRANSFORMER}.hidden_dropout=0.1
{ACTOR}.ppo_epochs=2 {OPTIM}.exp_avg_dtype=bf16 {OPTIM}.lr_scheduler_type=cosine {ROLLOUT}.dtype=float16
{ROLLOUT}.top_p=0.9 {ROLLOUT}.seed=7 {ROLLOUT}.engine_kwargs.vllm.hf_overrides=x {ROLLOUT}.multi_turn.enable=true
{MODEL}.lora.rank=8 {MODEL}.mtp.enable=true {CORRECTION}.bypass_mode=true distillation.enabled=true
skip.rollout.enable=true reward_model.enable=true trainer.critic_warmup=5 trainer.v1.trainer_mode=separate_async"""
SAME = f"{ROLLOUT}.top_p=1.0 {ROLLOUT}.dtype=bfloat16 {ACTOR}.ppo_epochs=1 {OPTIM}.optimizer=AdamW trainer.nnodes=1"


def read(*keys: str) -> tuple[RLConfig, list[str]]:
    return read_verl(None, [*NEEDED, *keys])


def num_ignored(notes: list[str]) -> int:
    return sum(int(match[1]) for note in notes if (match := re.match(r"ignored: (\d+) of verl's keys in ", note)))


@pytest.mark.parametrize(("value", "ending"), [("no_such_value", ""), ("7", ""), ("true", ".some.key"), ("null", "")])
def test_an_ignored_key_changes_nothing_and_is_counted(value: str, ending: str) -> None:
    names = [f"{name}x{ending}" if name.endswith("_") else f"{name}{ending}" for name in IGNORED]
    leaves = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    config, notes = read(*(f"{name}={value}" for name in leaves))
    assert config == read()[0]
    assert num_ignored(notes) == len(leaves)
    assert len([note for note in notes if note.startswith("ignored: ")]) < 30  # one for a section, not for a key


def test_how_many_gpus_cut_the_sampler_is_octavos_own_key() -> None:
    config, notes = read(f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.nnodes=2")
    assert config.rollout.tensor_parallel_size == 1  # verl's default is 2, and one process must run its scripts
    (note,) = (note for note in notes if "tensor_model_parallel_size" in note)
    assert note.startswith("ignored: 1 of") and "rollout.tensor_parallel_size" in note


def test_a_key_on_which_results_depend_is_taken_at_octavos_values_alone() -> None:
    plain = read()[0]
    for name, (values, _) in REFUSED.items():
        for value in values:
            config, notes = read(f"{name}={'null' if value is None else value}")
            assert (config, num_ignored(notes)) == (plain, 0), name
        for key in (name, f"{name}.some_key"):
            with pytest.raises(ConfigError, match=f"{re.escape(key)} = no_such_value .* is refused: .{{10}}"):
                read(f"{key}=no_such_value")


def test_what_would_change_results_is_refused_and_what_octavo_does_is_taken() -> None:
    for key in DECISIVE.split():
        with pytest.raises(ConfigError, match=f"{re.escape(key.partition('=')[0])} = .* is refused"):
            read(key)
    assert read(*SAME.split()) == read()


def test_what_says_the_same_as_another_key_is_taken() -> None:
    keys = ["data.train_files=a.jsonl", f"{TRANSFORMER}.fp8=hybrid", f"{TRANSFORMER}.fp8_recipe=mxfp8"]
    keys += [f"{MODEL}.path=/m", "data.seed=7", "data.max_prompt_length=9"]
    keys += ["data.train_batch_size=1024", "data.max_response_length=64"]
    values = dict(key.split("=") for key in (*NEEDED, *keys))
    for name, other in SAME_AS.items():
        assert read(*keys, f"{name}={values[other]}")[0] == read(*keys)[0]
        with pytest.raises(ConfigError, match=f"{re.escape(name)} = 3 .* is refused"):
            read(*keys, f"{name}=3")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_key_of_verls_own_files_is_mapped_ignored_or_refused(path: Path) -> None:
    values = {name: setting.value for name, setting in read_document(path, NEEDED).items()}
    notes = read_verl(path, NEEDED, ignore_unsupported=True)[1]
    mapped = {*(key.name for key in KEYS), *GROUPED}
    agreed = {name for name in values if name in REFUSED and values[name] in REFUSED[name][0]}
    agreed |= {name for name in values if name in SAME_AS and values[name] == values.get(SAME_AS[name])}
    dropped = [note for note in notes if note.startswith("dropped: ") and note.split()[2] not in mapped]
    others = values.keys() - mapped - agreed
    assert num_ignored(notes) + len(dropped) == len(others)
    assert num_ignored(notes) > len(others) / 2
