"""convert's report counts what multiplies by a weight and is no linear, and a warning says what was left."""

import math
import warnings

import pytest
import torch

from octavo import nn
from octavo.nn import ConversionReport, ConversionRow
from octavo.nn.other_products import find_products

HIDDEN, INNER, VOCAB = 64, 96, 100
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
}  # fmt: skip
ATTENTION = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2)  # elements of both layers


def convert(model: torch.nn.Module, recipe: str = "blockwise", **options: object) -> tuple[ConversionReport, list[str]]:
    """The report, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = nn.convert(model, recipe, **options)  # type: ignore[arg-type]
    return report, [str(warning.message) for warning in caught]


def experts_of(report: ConversionReport) -> list[ConversionRow]:
    return [row for row in report.rows if row.kind == "experts"]


@pytest.fixture(scope="module")
def families() -> dict[str, tuple[torch.nn.Module, int, int]]:
    """transformers' models with fused experts: model, experts, and how many of them a token meets."""
    transformers = pytest.importorskip("transformers")
    moe = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": INNER}
    oss = {"num_local_experts": 8, "num_experts_per_tok": 4, "layer_types": ["full_attention"] * 2}
    made = {
        "Mixtral": (transformers.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2), 8, 2),
        "Qwen3Moe": (transformers.Qwen3MoeConfig(**SIZES, **moe), 16, 4),
        "GptOss": (transformers.GptOssConfig(**SIZES, **oss), 8, 4),
    }
    with torch.device("meta"):
        return {
            name: (getattr(transformers, f"{name}ForCausalLM")(config), *counts)
            for name, (config, *counts) in made.items()
        }


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_fused_experts_are_counted_and_named(family, families):
    model, num, used = families[family]
    report, said = convert(model, "delayed")  # whose state fused experts do not hold
    experts = 2 * used * 3 * HIDDEN * INNER  # elements that a token meets, both layers'
    routers = 2 * HIDDEN * num
    assert report.fp8_flop_share == pytest.approx(ATTENTION / (ATTENTION + experts + routers))
    rows = experts_of(report)
    sizes = [(row.name.rpartition(".")[2], row.in_features * row.out_features) for row in rows[:2]]
    assert sizes == [("gate_up_proj", num * 2 * HIDDEN * INNER), ("down_proj", num * HIDDEN * INNER)]
    assert [row.in_features for row in rows[:2]] == [HIDDEN, INNER]
    assert all(row.recipe is None and row.active_share == used / num for row in rows)
    assert f"a token meets {used} of {num} ({family}Config.num_experts_per_tok)" in rows[0].reason
    text = str(report)
    assert f"8 of 9 linears in FP8, {report.fp8_flop_share:.1%} of a token's FLOPs with weights" in text
    assert f"4 of {family}Experts" in text and f"2 of {family}TopKRouter" in text
    left = experts / (ATTENTION + experts + routers)
    assert len(said) == 1 and f"convert left {left:.1%} of a token's FLOPs in high precision" in said[0]
    assert f"4 of {family}Experts" in said[0] and "Router" not in said[0]
    assert rows[0].reason.startswith("fused experts hold no state, which recipe 'delayed' has; a token meets")


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_fused_experts_run_in_fp8(family, families):
    model, num, used = families[family]
    report, said = convert(model)
    assert not said
    rows = experts_of(report)
    assert all(row.recipe == "blockwise" and row.active_share == used / num for row in rows)
    assert rows[0].reason.startswith("grouped GEMMs over the parameter; a token meets")
    total = sum(row.flops for row in report.rows if row.name != "lm_head")
    assert report.fp8_flop_share == pytest.approx(1 - 2 * 2 * HIDDEN * num / total)  # all but the routers
    assert "8 of 9 linears in FP8" in str(report) and f"4 of {family}Experts" in str(report)
    assert "4 of these in FP8" in str(report)
    other = convert(model, overrides={"model.layers.1": "rowwise", "down_proj": "bf16"})[0]
    assert [row.recipe for row in experts_of(other)] == ["blockwise", None, "rowwise", "rowwise"]
    assert experts_of(other)[1].reason.startswith("the recipe is high precision, override 'down_proj'")


def test_experts_of_an_unknown_share_all_count() -> None:
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.zeros(4, 8, 16))
            self.top_k = 1  # of what, nothing says

    [row] = experts_of(convert(torch.nn.Sequential(torch.nn.Linear(16, 16), Stack()))[0])
    assert (row.name, row.flops) == ("1.up", 2 * 4 * 8 * 16)
    assert "all 4 are counted, as nothing tells how many of them a token meets" in row.reason


def test_what_ignore_names_is_not_warned_of(families: dict[str, tuple[torch.nn.Module, int, int]]) -> None:
    model = families["Mixtral"][0]
    for ignore in (("lm_head", "experts"), ("lm_head", "gate_up_proj", "down_proj")):
        report, said = convert(model, ignore=ignore)
        assert not said
        assert all(row.reason.startswith("left out by ignore; a token meets") for row in experts_of(report))
        assert report.fp8_flop_share < 0.5


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (torch.nn.Conv1d(4, 6, 5), [("0", "convolution", 4 * 5, 6)]),
        (torch.nn.Conv2d(4, 6, 5, groups=2), [("0", "convolution", 2 * 25, 6)]),
        (torch.nn.Conv3d(4, 6, 5), [("0", "convolution", 4 * 125, 6)]),
        (torch.nn.ConvTranspose1d(4, 6, 5), [("0", "convolution", 4 * 5, 6)]),
        (torch.nn.ConvTranspose2d(4, 6, 5, groups=2), [("0", "convolution", 2 * 25, 6)]),
        (torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(4, 6, 5)), [("0", "convolution", 4 * 5, 6)]),
        (torch.nn.Bilinear(3, 4, 5), [("0", "other", 12, 5)]),
        (torch.nn.MultiheadAttention(8, 2), [("0.in_proj_weight", "other", 8, 24)]),
        (
            torch.nn.MultiheadAttention(8, 2, kdim=4, vdim=2),
            [(f"0.{name}_proj_weight", "other", size, 8) for name, size in (("q", 8), ("k", 4), ("v", 2))],
        ),
        (
            torch.nn.LSTM(3, 4, num_layers=2),
            [(f"0.weight_{kind}_l{i}", "other", 3 if (i, kind) == (0, "ih") else 4, 16)
             for i in (0, 1) for kind in ("ih", "hh")],
        ),
        (torch.nn.GRU(3, 4), [("0.weight_ih_l0", "other", 3, 12), ("0.weight_hh_l0", "other", 4, 12)]),
        (torch.nn.GRUCell(3, 4), [("0.weight_ih", "other", 3, 12), ("0.weight_hh", "other", 4, 12)]),
        (torch.nn.Linear(8, 8), []),
        (torch.nn.Embedding(8, 8), []),
        (torch.nn.LayerNorm((4, 8)), []),
        (torch.nn.PReLU(8), []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)  # fmt: skip
def test_torchs_layers_are_known(layer: torch.nn.Module, expected: list[tuple[str, str, int, int]]) -> None:
    found = find_products(torch.nn.Sequential(layer))
    assert [(p.name, p.kind, p.in_features, p.out_features) for p in found] == expected


def test_added_parameters_are_no_products() -> None:
    class PatchEmbeddings(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position_table = torch.nn.Parameter(torch.zeros(2, 8, 16))
            self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 16))
            self.queries = torch.nn.Parameter(torch.zeros(8, 16))

    assert find_products(PatchEmbeddings()) == []


def test_a_convolutions_share_is_not_claimed() -> None:
    """Conv2d(3, 16, 7) of 224 x 224 pictures is nearly all of a model's FLOPs, and 3.5 % of its weights' elements."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 7), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 4096)
    )
    report, said = convert(model)
    assert math.isnan(report.fp8_flop_share) and math.isnan(report.rows[-1].flops)
    text = str(report)
    assert "1 of 1 linears in FP8, an unknown share of a token's FLOPs with weights" in text
    assert "convolutions not counted: their FLOPs depend on the input's size; 1 of Conv2d" in text
    assert "%" not in text and "counted with" not in text
    assert len(said) == 1 and "1 of Conv2d" in said[0]
    assert "convert left an unknown share of a token's FLOPs" in said[0] and "3.5% of all weights' elements" in said[0]


def test_a_convolution_that_ignore_names_is_not_warned_of() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.Linear(64, 64))
    report, said = convert(model, ignore=("0",))
    assert not said and math.isnan(report.fp8_flop_share)
    _, said = convert(torch.nn.Sequential(*model, torch.nn.Bilinear(32, 32, 64)), ignore=("0",))
    assert len(said) == 1 and "an unknown share" in said[0] and "1 of Bilinear" in said[0]


def test_most_weights_in_high_precision_are_warned_of_though_a_token_meets_few() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.zeros(64, 8, 16))
            self.num_experts, self.top_k = 64, 1

    _, said = convert(torch.nn.Sequential(torch.nn.Linear(64, 64), Experts()))
    assert (
        len(said) == 1
        and "convert left 3.0% of a token's FLOPs" in said[0]
        and "66.7% of all weights' elements" in said[0]
    )


def test_emulated_products_are_said() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    assert "1 of 1 linears in FP8, emulated (operands are decoded), 100.0%" in str(nn.convert(model, "nvfp4"))
    assert "emulated" not in str(nn.convert(model, "rowwise"))
