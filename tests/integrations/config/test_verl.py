"""verl's keys: one that is mapped changes the config; each other one is ignored with a note, or refused by name."""

import functools
import math
import re
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.integrations.config import read_verl
from octavo.integrations.config.verl_keys import (
    ACTOR,
    CORRECTION,
    GROUPED,
    KEYS,
    MODEL,
    OPTIM,
    PARTIAL,
    REPLAYS,
    ROLLOUT,
    ROUTES,
    STALENESS,
    SYNC,
    TRANSFORMER,
    Key,
)
from octavo.rl.config import RLConfig

NEEDED = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8")
FILE = "data.train_files=a.jsonl"
FP8 = f"{TRANSFORMER}.fp8=hybrid"
IS = f"{CORRECTION}.rollout_is=token"
KV_FP8 = f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8"
QUANT = f"{ROLLOUT}.quantization=fp8"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"


def read(*overrides: str, **kwargs: Any) -> RLConfig:
    needed = [key for key in NEEDED if key.partition("=")[0] not in {o.partition("=")[0] for o in overrides}]
    return read_verl(None, [*needed, *overrides], **kwargs)[0]


def value_of(config: RLConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


REWARD = f"{FILE} reward.custom_reward_function.path=/r.py"
OWN = "custom_reward_function"
LONG = f"{OVERLONG}.enable=True"
FILTER = "algorithm.filter_groups"
_SAMPLES: dict[type, tuple[Any, ...]] = {int: (768,), float: (0.0625,), bool: (True, False)}
# verl's keys, of which the last changes the recipe -> octavo's keys and their values
MAPPED = f"""
{MODEL}.path=/m -> model.path=/m warmup.steps=0
{ROLLOUT}.n=16 -> rollout.samples_per_prompt=16
{OPTIM}.betas=[0.8,0.95] -> trainer.optimizer.beta1=0.8 trainer.optimizer.beta2=0.95
{OPTIM}.lr_warmup_steps=10 -> trainer.lr_warmup_steps=40
{ACTOR}.ppo_mini_batch_size=64 -> trainer.mini_batch_size=64
{ACTOR}.clip_ratio_low=0.1 -> algorithm.clip_low=0.1
{ACTOR}.clip_ratio_high=0.28 -> algorithm.clip_high=0.28
{ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=0.3 {ACTOR}.clip_ratio=0.1 -> algorithm.clip_low=0.1
{ACTOR}.clip_ratio_c=10 -> algorithm.clip_c=10.0
{ACTOR}.policy_loss.loss_mode=cispo -> algorithm.policy_loss=cispo algorithm.clip_c=0.0
{ACTOR}.policy_loss.loss_mode=gspo -> algorithm.loss_aggregation=seq-mean-token-mean
{ACTOR}.use_kl_loss=True -> algorithm.kl_coef=0.001
{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=k3 {ACTOR}.kl_loss_coef=0.02 -> algorithm.kl_coef=0.02
{ACTOR}.tis_imp_ratio_cap=3 -> correction.cap=3.0 correction.kind=token_tis
algorithm.adv_estimator=rloo -> algorithm.name=rloo
{FILTER}.enable=True {FILTER}.metric=acc {FILTER}.max_num_gen_batches=3 -> algorithm.max_gen_batches=3
{ROLLOUT}.quantization=fp8 -> rollout.recipe=blockwise exact=False precision=linears
{KV_FP8} {ROLLOUT}.quantization=fp8 -> precision=linears+kv
{REPLAYS[0]}=R3 {QUANT} {ROUTES}=True -> router_replay=True
{ROUTES}=True {QUANT} {REPLAYS[0]}=R3 -> router_replay=True
{ROUTES}=True {QUANT} {REPLAYS[1]}=R3 -> router_replay=True
{QUANT} {IS} {SYNC}=4 {STALENESS}=1 -> asynchronous.max_policy_lag=1
{IS} {PARTIAL}=True {STALENESS}=2.0 -> exact=False
{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype=fp8 -> rollout.kv_cache_dtype=fp8
{ROLLOUT}.engine_kwargs.sglang.kv_cache_dtype=fp8_e4m3 -> rollout.kv_cache_dtype=fp8
{TRANSFORMER}.fp8_recipe=blockwise {TRANSFORMER}.fp8=e4m3 -> trainer.fp8_format=e4m3
{FP8} {TRANSFORMER}.fp8_recipe=blockwise -> trainer.recipe=blockwise
{CORRECTION}.rollout_is=token -> correction.kind=token_tis
{CORRECTION}.rollout_is=sequence -> correction.kind=sequence_tis
{IS} {CORRECTION}.rollout_is_threshold=3.0 -> correction.cap=3.0
{IS} {CORRECTION}.rollout_is_threshold=0.4_5.0 -> correction.kind=icepop correction.low=0.4
{IS} {CORRECTION}.rollout_is_batch_normalize=true -> correction.batch_normalize=True
{CORRECTION}.rollout_rs_threshold=0.01 {CORRECTION}.rollout_rs=seq_mean_k3 -> correction.reject=k3
{CORRECTION}.rollout_rs=seq_mean_k3 {CORRECTION}.rollout_rs_threshold=0.01 -> correction.reject_high=0.01
{CORRECTION}.rollout_token_veto_threshold=1e-4 -> correction.veto=0.0001
{OVERLONG}.len=64 {LONG} -> algorithm.overlong_buffer=64
{LONG} {OVERLONG}.len=32 -> algorithm.overlong_buffer=32
{LONG} {OVERLONG}.penalty_factor=0.5 -> algorithm.overlong_penalty=0.5
data.train_files=['a.jsonl'] -> task.path=a.jsonl task.name=questions
data.train_files=['a.jsonl','b.jsonl'] -> task.path=('a.jsonl','b.jsonl')
{FILE} data.val_files=b.jsonl -> task.heldout_path=b.jsonl
{FILE} data.prompt_key=question -> task.question_key=question
{FILE} data.max_prompt_length=1024 -> task.max_prompt_tokens=1024
{FILE} data.filter_overlong_prompts=True -> task.drop_long_prompts=True
data.val_max_samples=30 -> eval.num_prompts=30
{FILE} custom_reward_function.path=/r.py -> task.verifier=/r.py:compute_score
{REWARD} reward.custom_reward_function.name=f -> task.verifier=/r.py:f
{FILE} {OWN}.path=/r.py {OWN}.reward_kwargs.bonus=0.5 -> task.verifier_options={{'bonus':0.5}}
{FILE} trainer.total_epochs=15 -> trainer.epochs=15
trainer.test_freq=5 -> eval.every=5
trainer.save_freq=20 -> run.checkpoint_every=20
trainer.max_actor_ckpt_to_keep=3 -> run.keep=3
trainer.default_local_dir=out -> run.dir=out
trainer.experiment_name=e trainer.project_name=p -> run.dir=checkpoints/p/e
trainer.logger=['console'] -> run.tensorboard=False
trainer.project_name=p trainer.logger=['console','wandb'] -> run.wandb=p
trainer.project_name=p trainer.logger=['console','mlflow'] -> run.mlflow=p
""".strip().splitlines()


@pytest.mark.parametrize("row", MAPPED)
def test_a_mapped_key_changes_the_recipe(row: str) -> None:
    keys, _, expected = row.partition(" -> ")
    *others, last = keys.split()
    name = last.partition("=")[0]
    config, notes = read_verl(None, [*(key for key in NEEDED if not key.startswith(f"{name}=")), *others, last])
    try:
        before = read(*others)
    except ConfigError:  # the others mean nothing without it
        before = None
    for key, _, value in (pair.partition("=") for pair in expected.split()):
        found = value_of(config, key)
        assert str(found).replace(" ", "") == value
        assert any(f"{name} = " in note and f" -> {key} = " in note for note in notes)
        assert before is None or value_of(before, key) != found


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_key_that_means_one_of_octavos_sets_it(key: Key) -> None:
    """To each value that octavo knows, else to one of its kind that is not verl's default."""
    samples = key.values or {value: value for value in _SAMPLES[key.kind] if value != key.default}
    assert samples
    for theirs, ours in samples.items():
        config, notes = read_verl(None, [*NEEDED, f"{key.name}={theirs}"])
        assert value_of(config, key.to) == ours
        assert any(f"{key.name} = " in note and f" -> {key.to} = " in note for note in notes)


def test_every_key_of_the_tables_is_tried_above() -> None:
    tried = {key.partition("=")[0] for row in MAPPED for key in row.partition(" -> ")[0].split()}
    below = {f"{CORRECTION}.rollout_rs_threshold_lower", f"{OPTIM}.override_optimizer_config.fp8_recipe"}
    below |= {"algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"}
    same = ("reward.reward_kwargs.", "reward_model.overlong_buffer.", "custom_reward_function.name")  # by other names
    assert {key for key in GROUPED if not key.startswith(same)} <= tried | below


@pytest.mark.parametrize("prefix", ["reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"])
def test_other_names_of_the_overlong_buffer(prefix: str) -> None:
    config = read(f"{prefix}.enable=True", f"{prefix}.len=64", f"{prefix}.penalty_factor=0.5", f"{prefix}.log=False")
    assert (config.algorithm.overlong_buffer, config.algorithm.overlong_penalty) == (64, 0.5)


def test_verls_defaults_hold_where_nothing_is_named() -> None:
    config = read()
    assert config.trainer.optimizer.lr == 1e-6
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.clip_c) == (0.2, 0.2, 3.0)
    assert config.rollout.prompts_per_step == 1024
    assert (config.rollout_numerics.recipe.name, config.rollout.kv_cache_dtype) == ("bf16", "bf16")
    assert config.exact  # one recipe on both sides
    assert config.correction.kind == "none"


def test_a_recipe_keeps_what_no_key_names() -> None:
    base = RLConfig(exact=False, trainer={"recipe": "bf16"}, rollout={"recipe": "blockwise"})
    config = read_verl(None, [f"{ROLLOUT}.temperature=0.5"], base)[0]
    rollout = {"recipe": "blockwise", "temperature": 0.5}
    assert config == RLConfig(exact=False, trainer={"recipe": "bf16"}, rollout=rollout)
    changed = read_verl(None, [f"{ROLLOUT}.quantization=null"], base)[0]
    assert changed.exact
    assert changed.rollout_numerics.recipe.name == "bf16"


def test_a_run_over_files_has_verls_epochs() -> None:
    assert (read(FILE).trainer.epochs, read().trainer.epochs) == (30, None)
    assert read("trainer.total_epochs=15", "trainer.total_training_steps=8").trainer.epochs is None  # nothing to pass
    both = read(FILE, "trainer.total_epochs=15", "trainer.total_training_steps=8").trainer
    assert (both.epochs, both.steps) == (15, 8)
    base = RLConfig(task={"name": "questions", "path": "a.jsonl"}, trainer={"steps": 7})
    config, notes = read_verl(None, ["trainer.total_epochs=2"], base)
    assert (config.trainer.epochs, config.trainer.steps) == (2, 7)
    assert "trainer.steps = 7 ends the epochs where it comes first" in notes


def test_who_judges_is_said_where_no_function_is_given() -> None:
    said = "no custom_reward_function -> task.verifier = math, for all answers; verl chooses by data_source"
    assert said in read_verl(None, [*NEEDED, FILE])[1]
    assert said not in read_verl(None, [*NEEDED, *REWARD.split()])[1]
    exact = RLConfig(task={"name": "questions", "path": "b.jsonl", "verifier": "exact"})
    assert said not in read_verl(None, [*NEEDED, FILE], set_keys=exact)[1]


def test_one_refused_file_does_not_refuse_the_keys_beside_it() -> None:
    with pytest.raises(ConfigError) as caught:
        read("data.train_files=[1]", "data.val_files=b.jsonl", "data.max_prompt_length=9")
    assert str(caught.value).count("is refused") == 1


def test_set_goes_over_verls_defaults_and_under_its_keys() -> None:
    set_keys = RLConfig(algorithm={"clip_high": 0.3}, trainer={"optimizer": {"lr": 1e-5}})
    config = read(f"{OPTIM}.lr=2e-6", set_keys=set_keys)
    assert config.algorithm.clip_high == 0.3
    assert config.trainer.optimizer.lr == 2e-6
    assert config.algorithm.clip_low == 0.2


def test_verls_mini_batch_size_goes_over_a_count_and_its_default_under_it() -> None:
    counted = RLConfig(trainer={"minibatches": 2}, rollout={"prompts_per_step": 1024})
    assert read(set_keys=counted).num_minibatches == 2
    size = f"{ACTOR}.ppo_mini_batch_size=64"
    for config in (read(size, set_keys=counted), read_verl(None, [size], counted)[0]):
        assert (config.trainer.mini_batch_size, config.num_minibatches) == (64, 16)
    warmup = f"{OPTIM}.lr_warmup_steps=10"
    assert read(warmup, size).trainer.lr_warmup_steps == 160
    assert read(warmup, set_keys=counted).trainer.lr_warmup_steps == 20


def test_fp8_on_both_sides_is_exact() -> None:
    both = [FP8, f"{TRANSFORMER}.fp8_recipe=blockwise", f"{OPTIM}.override_optimizer_config.fp8_recipe=blockwise"]
    config = read(*both, f"{ROLLOUT}.quantization=fp8")
    assert config.exact
    assert config.trainer_numerics.recipe.name == config.rollout_numerics.recipe.name == "blockwise"
    delayed = read(FP8, f"{ROLLOUT}.quantization=fp8")  # Megatron's default recipe
    assert not delayed.exact
    assert delayed.trainer.recipe == "delayed"


@pytest.mark.parametrize(("given", "kv", "level"), [("auto", "bf16", "linears"), ("fp8", "fp8", "linears+kv")])
def test_a_level_has_the_numerics_that_its_keys_say_one_by_one(given: str, kv: str, level: str) -> None:
    config = read(QUANT, f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_dtype={given}")
    plain = RLConfig(exact=False, trainer={"recipe": "bf16"}, rollout={"recipe": "blockwise", "kv_cache_dtype": kv})
    assert config.precision == level
    assert config.trainer_numerics == plain.trainer_numerics
    assert config.rollout_numerics == plain.rollout_numerics


@pytest.mark.parametrize(
    ("keys", "set_keys"),
    [
        ([QUANT, FP8], {}),  # delayed scaling trains
        ([f"{ROLLOUT}.quantization=mxfp8"], {}),
        ([QUANT], {"trainer": {"recipe": "bf16"}}),
        ([QUANT], {"rollout": {"attention_dtype": "fp8", "kv_cache_dtype": "fp8"}}),
    ],
)
def test_what_no_level_means_stays_in_the_sections(keys: list[str], set_keys: dict[str, Any]) -> None:
    config = read(*keys, set_keys=RLConfig(**set_keys))
    assert config.precision == ""
    assert config.rollout_numerics.recipe.is_fp8


def test_router_replay_has_nothing_to_do_in_exact_mode() -> None:
    config, notes = read_verl(None, [*NEEDED, f"{ROUTES}=True", f"{REPLAYS[0]}=R3"])
    assert config.exact
    assert not config.router_replay
    assert any(ROUTES in note and "without a replay" in note for note in notes)
    base = RLConfig(exact=False, router_replay=True, rollout={"recipe": "blockwise"}, trainer={"recipe": "bf16"})
    assert not read_verl(None, [f"{REPLAYS[0]}=disabled"], base)[0].router_replay


def test_asynchronous_mode() -> None:
    config = read(IS, f"{STALENESS}=1", f"{PARTIAL}=True", "async_training.require_batches=1")
    assert (config.asynchronous.max_policy_lag, config.asynchronous.partial_rollouts) == (1, "continue")
    assert not config.exact
    still = read(f"{STALENESS}=0", f"{PARTIAL}=False")  # verl reads the second above 0 alone
    assert still.exact
    assert still.asynchronous.max_policy_lag == 0


@pytest.mark.parametrize(
    ("option", "threshold", "kind", "low", "high"),
    [
        ("token_k1", "0.5_2.0", "token", 0.5, 2.0),
        ("token_k1", "0.25_2.0", "token", 0.5, 4.0),  # verl bounds the ratio's inverse
        ("seq_sum_k1", "2.0", "sequence", 0.5, 2.0),
        ("seq_mean_k1", "0.999_1.001", "geometric", 1 / 1.001, 1 / 0.999),
        ("token_k2", "0.5", "token", math.exp(-1), math.exp(1)),
        ("geometric", "1.25", "geometric", 0.8, 1.25),  # before the divergences had names
    ],
)
def test_rejection(option: str, threshold: str, kind: str, low: float, high: float) -> None:
    correction = read(f"{CORRECTION}.rollout_rs={option}", f"{CORRECTION}.rollout_rs_threshold={threshold}").correction
    assert correction.reject == kind
    assert (correction.reject_low, correction.reject_high) == pytest.approx((low, high))


def test_a_lower_bound_by_its_old_name() -> None:
    keys = ("rollout_rs=token", "rollout_rs_threshold=3.0", "rollout_rs_threshold_lower=0.1")
    correction = read(*(f"{CORRECTION}.{key}" for key in keys)).correction
    assert (correction.reject_low, correction.reject_high) == (0.1, 3.0)


def test_the_parts_of_a_kl_in_the_reward_mean_nothing_without_it() -> None:
    assert read("algorithm.kl_penalty=k2", "algorithm.kl_ctrl.kl_coef=0.5").algorithm.kl_coef == 0.0


OTHERS = f"""
algorithm.adv_estimator=gae
{ROUTES}=True
{TRANSFORMER}.hidden_dropout=0.1
{ROLLOUT}.beam_width=4
{REPLAYS[0]}=R3
{ACTOR}.ppo_mini_batch_size=100
{ACTOR}.clip_ratio=0.1
{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=mse
{OPTIM}.lr=fast
{OPTIM}.betas=[0.9]
{TRANSFORMER}.fp8_recipe=blockwise
{FP8} {OPTIM}.override_optimizer_config.fp8_recipe=mxfp8
{CORRECTION}.rollout_is_threshold=5
{CORRECTION}.rollout_is=sequence {CORRECTION}.rollout_is_threshold=0.5_2
{CORRECTION}.rollout_is_batch_normalize=True
{CORRECTION}.rollout_rs=token_k1
{CORRECTION}.rollout_rs_threshold=2
{IS} {CORRECTION}.rollout_is_threshold=none_2
algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=0
algorithm.use_kl_in_reward=True
data.max_prompt_length=1024
data.train_files=[1]
data.filter_overlong_prompts=True
data.max_response_length=32 {ROLLOUT}.response_length=64
trainer.total_epochs=15
custom_reward_function.reward_kwargs.bonus=1
trainer.logger=['swanlab']
{STALENESS}=0.5
{IS} {STALENESS}=1 {PARTIAL}=False
{IS} {STALENESS}=1 {SYNC}=3
{PARTIAL}=True
async_training.use_rollout_log_probs=True
model.path=/m
""".strip().splitlines()


@pytest.mark.parametrize("row", OTHERS)
def test_a_key_that_is_not_honoured_is_refused_by_name(row: str) -> None:
    name = re.escape(row.split()[-1].partition("=")[0])
    with pytest.raises(ConfigError, match=rf"verl's {name} = .* is refused: .{{10}}"):
        read(*row.split())


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.train_batch_size=100", r"ppo_mini_batch_size = 256 \(its default\) is refused"),
        (f"{ROLLOUT}.temperatures=0.7", "did you mean actor_rollout_ref.rollout.temperature"),
        ("actor_rollout.rollout.n=4", r"did you mean actor_rollout_ref.rollout.n\?"),
        (f"{STALENESS}=1", "octavo refuses: .*weigh them by correction.kind"),
        (f"{ROLLOUT}.temperature=0", "verl's keys make a config that octavo refuses: .*temperature"),
    ],
)
def test_a_refusal_names_the_key_that_is_meant(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(key)


def test_defaults_that_octavo_cannot_have_must_be_replaced() -> None:
    with pytest.raises(ConfigError) as caught:
        read_verl(None, [])
    for named in ("algorithm.adv_estimator = gae", f"{ROLLOUT}.n = 1"):
        assert f"{named} (its default) is refused" in str(caught.value)


def test_all_that_is_refused_is_said_at_once_and_can_be_dropped() -> None:
    keys = ["trainer.nnodes=2", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.temperature=0.5"]
    with pytest.raises(ConfigError) as caught:
        read(*keys)
    assert str(caught.value).count("is refused") == 2
    config, notes = read_verl(None, [*NEEDED, *keys], ignore_unsupported=True)
    assert config.rollout.temperature == 0.5
    assert sum(note.startswith("dropped: verl's ") for note in notes) == 2
