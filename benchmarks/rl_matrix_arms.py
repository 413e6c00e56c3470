"""The learning matrix: model families, groups of arms, and what each arm adds to rl_matrix.toml."""

import dataclasses

# family -> what it adds; arms of one family and seed begin from one warm start
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("model.family=qwen3",),
    "llama": ("model.family=llama",),
    "qwen3_moe": (
        "model.family=qwen3_moe",
        "model.num_experts=8",
        "model.num_experts_per_tok=2",
        "model.moe_intermediate_size=256",
        "model.router_aux_loss_coef=0.001",
    ),
}
_TIS = ("correction.kind=token_tis", "correction.cap=2.0")
_BF16 = ("precision=bf16",)
_FP8_ROLLOUT = ("precision=linears+kv",)
_COARSE_ROLLOUT = ("precision=linears+kv+attention", "rollout.kv_scales=one")
_FP4_ROLLOUT = (*_COARSE_ROLLOUT, "rollout.recipe=nvfp4")
_EXACT = ("exact=true", "precision=end_to_end")


def _kv(kind: str) -> tuple[str, ...]:
    return (*_FP8_ROLLOUT, f"rollout.kv_scales={kind}", *_TIS)


@dataclasses.dataclass(frozen=True)
class Group:
    """Arms that are compared with each other.

    Attributes:
        title: for people. family: a key of FAMILIES. seeds: how many. base: the arm that others are measured against.
        arms: name -> overrides of rl_matrix.toml. common: overrides of all of them.
        record: in benchmarks/records, that its rows go to.
    """

    title: str
    family: str
    seeds: int
    base: str
    arms: dict[str, tuple[str, ...]]
    common: tuple[str, ...] = ()
    record: str = "rl_matrix"


GROUPS: dict[str, Group] = {
    "dense": Group(
        "Dense with QK-norm",
        "qwen3",
        3,
        "bf16",
        {
            "bf16": _BF16,
            "fp8-rollout": _FP8_ROLLOUT,
            "fp8-rollout+tis": (*_FP8_ROLLOUT, *_TIS),
            "end-to-end+tis": ("precision=end_to_end", *_TIS),
            "exact": _EXACT,
        },
    ),
    "llama": Group(
        "Dense without QK-norm, FP8 rollout with TIS",
        "llama",
        2,
        "kv-bf16",
        {
            "kv-bf16": ("precision=linears", *_TIS),
            "kv-one": _kv("one"),
            "kv-calibrated-once": _kv("calibrated_once"),
            "kv-engine": _kv("engine"),
            "kv-trainer": _kv("trainer"),
            "kv-per-token-head": _kv("per_token_head"),
        },
    ),
    "moe": Group(
        "Mixture of experts",
        "qwen3_moe",
        3,
        "bf16",
        {"bf16": _BF16, "fp8-rollout+tis": (*_FP8_ROLLOUT, *_TIS), "exact": _EXACT},
    ),
    "aggressive": Group(
        "Dense with QK-norm, aggressive: a coarse rollout, a higher learning rate, more updates a batch",
        "qwen3",
        3,
        "exact",
        {
            "fp8-rollout": _COARSE_ROLLOUT,
            "fp8-rollout+corrected": (*_COARSE_ROLLOUT, "correction.kind=sequence_tis", "correction.cap=2.0"),
            "exact": _EXACT,
        },
        common=("trainer.optimizer.lr=1e-4", "trainer.minibatches=4"),
    ),
    "aggressive-fp4": Group(
        "Dense with QK-norm, aggressive: coarse rollouts in FP4, a higher learning rate, more updates a batch",
        "qwen3",
        3,
        "exact",
        {
            "fp4-rollout": _FP4_ROLLOUT,
            "fp4-rollout+tis": (*_FP4_ROLLOUT, *_TIS),
            "exact": _EXACT,
        },
        # twice the samples of the others, for importance weights make a step noisier
        common=(
            "trainer.optimizer.lr=6e-5",
            "trainer.minibatches=4",
            "trainer.steps=400",
            "rollout.prompts_per_step=64",
            "rollout.max_num_seqs=512",
        ),
        record="rl_aggressive",
    ),
}

# aggressive group -> the arm that is to fail there
UNCORRECTED = {"aggressive": "fp8-rollout", "aggressive-fp4": "fp4-rollout"}

# A minute on a CPU: does it run at all?
QUICK = (
    "model.hidden_size=128",
    "model.intermediate_size=128",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "task.options.num_items=6",
    "warmup.steps=30",
    "warmup.check_prompts=16",
    "warmup.batch_size=32",
    "warmup.lr=5e-3",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_tokens=7",
    "trainer.steps=4",
    "eval.every=2",
    "eval.num_prompts=16",
    "run.checkpoint_every=2",
)
QUICK_MOE = ("model.num_experts=2", "model.num_experts_per_tok=1", "model.moe_intermediate_size=128")
