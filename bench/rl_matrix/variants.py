"""The learning matrix: model families, groups of variants, and what each variant adds to rl_matrix.toml."""

import dataclasses

_MOE = (
    "model.family=qwen3_moe",
    "model.num_experts=8",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=256",
    "model.router_aux_loss_coef=0.001",
)
# more layers, answers twice as long, a warm start that ends with a sharper policy
_DEEP = (
    "model.num_hidden_layers=8",
    "model.max_position_embeddings=256",
    "task.options.num_items=96",
    "warmup.steps=4000",
    "warmup.target_reward=0.6",
)
# family -> what it adds; variants of one family and seed begin from one warm start
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("model.family=qwen3",),
    "llama": ("model.family=llama",),
    "qwen3_moe": _MOE,
    "deep": ("model.family=qwen3", *_DEEP),
    "deep_moe": (*_MOE, *_DEEP),
    "small": (  # for a CPU
        "model.family=qwen3",
        "model.hidden_size=128",
        "model.intermediate_size=256",
        "model.head_dim=32",
        "task.options.num_items=24",
        "warmup.target_reward=0.5",
        "warmup.batch_size=64",
        "warmup.check_prompts=128",
        "warmup.lr=3e-3",
    ),
}
UNCORRECTED = "uncorrected"  # the variant whose mismatch nothing weighs, in groups that compare corrections
_TIS = ("correction.kind=token_tis", "correction.cap=2.0")
_BF16 = ("precision=bf16",)
_FP8_ROLLOUT = ("precision=linears+kv",)
_EXACT = ("exact=true", "precision=end_to_end")
# all but bf16 roll out alike: blockwise FP8 linears, an FP8 KV cache with a scale a token and head, attention in bf16
_CORRECTIONS = {
    "bf16": _BF16,
    "uncorrected": (*_FP8_ROLLOUT, "correction.kind=none"),
    "tis": (*_FP8_ROLLOUT, *_TIS),
    "exact": _EXACT,
}
_MANY_UPDATES = ("rollout.max_tokens=97", "trainer.minibatches=8")


def _kv(kind: str) -> tuple[str, ...]:
    return (*_FP8_ROLLOUT, f"rollout.kv_scales={kind}", *_TIS)


@dataclasses.dataclass(frozen=True)
class Group:
    """Variants that are compared with each other.

    Attributes:
        title: for people.
        family: a key of FAMILIES.
        seeds: how many.
        base: what others are measured against.
        variants: name -> overrides of rl_matrix.toml.
        common: overrides of all of them.
        record: in bench/records, that its rows go to.
    """

    title: str
    family: str
    seeds: int
    base: str
    variants: dict[str, tuple[str, ...]]
    common: tuple[str, ...] = ()
    record: str = "rl_matrix"

    @property
    def compares_corrections(self) -> bool:
        """Whether its variants are to tell what corrections are worth."""
        return UNCORRECTED in self.variants


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
            "kv-one": _kv("_fixed"),
            "kv-calibrated-once": _kv("_calibrated_once"),
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
    "corrections": Group(
        "Corrections in one rollout format: long answers, 8 layers, 8 updates a batch",
        "deep",
        3,
        "bf16",
        {**_CORRECTIONS, "exact-bf16-backward": ("exact=true", "precision=linears+kv")},
        common=_MANY_UPDATES,
        record="rl_corrections",
    ),
    "corrections-moe": Group(
        "Corrections in one rollout format: mixture of experts, long answers, 8 layers, 8 updates a batch",
        "deep_moe",
        3,
        "bf16",
        _CORRECTIONS,
        common=_MANY_UPDATES,
        record="rl_corrections",
    ),
    "corrections-cpu": Group(
        "Corrections in one rollout format, on a CPU: 4 layers, answers of 25 tokens, 8 updates a batch",
        "small",
        3,
        "bf16",
        _CORRECTIONS,
        common=(
            "rollout.prompts_per_step=16",
            "rollout.max_tokens=25",
            "trainer.steps=60",
            "trainer.minibatches=8",
            "trainer.optimizer.lr=5e-5",
            "eval.every=5",
            "eval.num_prompts=256",
        ),
        record="rl_corrections_cpu",
    ),
}

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
