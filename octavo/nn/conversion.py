"""convert: give the linears of a model a recipe of their own, and report what was done to each and why."""

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from octavo.deprecation import former_keywords
from octavo.errors import ConfigError, RecipeError
from octavo.nn.autocast_context import HIGH_PRECISION
from octavo.nn.autocast_linear import adopt
from octavo.nn.fused_experts import FusedExperts, set_experts_recipe, why_not_experts
from octavo.nn.fusion import describe_fusion, plan_fusion
from octavo.nn.grouped_linear import GroupedLinear
from octavo.nn.layer_norm import LayerNorm
from octavo.nn.linear import Linear
from octavo.nn.moe import Router
from octavo.nn.other_products import Product, find_products
from octavo.nn.overrides import checked_names, match_rank, name_nearest, resolve
from octavo.nn.rms_norm import RMSNorm
from octavo.nn.scale_updates import follow_steps
from octavo.nn.speed_table import measured_speedup
from octavo.nn.transposed_linear import TransposedLinear, is_conv1d, linear_sizes
from octavo.numerics.contract import check_exact
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.ops._runtime.recipe_support import require_recipe

DEFAULT_IGNORE = ("lm_head",)
_ROUTER_REASON = "a router: rounding its logits would send tokens to other experts"
_IGNORED_REASON = "left out by ignore"
_HEAD_REASON = "left out by ignore: rounding logits shows in every probability"
_MUCH, _MOST = 0.05, 0.5  # of a token's FLOPs, of all weights' elements


@dataclasses.dataclass(frozen=True)
class ConversionRow:
    """What became of one linear: its full name, sizes, recipe (None in high precision) and the reason.

    active_share is the share of its rows that a token meets: below 1 for experts. kind is "linear" (routers too), or
    what else multiplies by a weight: "experts" (fused in one 3-D parameter), "convolution" or "other"; layer is the
    module's type. is_emulated says that operands are quantized and decoded, and the products run in high precision.
    """

    name: str
    in_features: int
    out_features: int
    recipe: str | None
    reason: str
    active_share: float = 1.0
    kind: str = "linear"
    layer: str = ""
    is_emulated: bool = False

    @property
    def flops(self) -> float:
        """Of its product for one token: two a weight element that the token meets.

        NaN for a convolution, which has as many for each place of its output: they depend on the input's size.
        """
        return math.nan if self.kind == "convolution" else 2 * self.num_elements * self.active_share

    @property
    def num_elements(self) -> int:
        """Of the weight."""
        return self.in_features * self.out_features


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """Every linear of a model and what else multiplies by a weight, in FP8 or not, and why; and which layers fuse."""

    rows: tuple[ConversionRow, ...]
    fusion: str = ""

    @property
    def fp8_names(self) -> tuple[str, ...]:
        """Full names of the linears that run in FP8: the list that checkpoints save and every side compares."""
        return tuple(row.name for row in self.rows if row.recipe)

    @property
    def fp8_flop_share(self) -> float:
        """Share of a token's FLOPs with weights that run in FP8, lm_head not counted; 0 to 1.

        NaN for a model with convolutions, whose FLOPs depend on the input's size.
        """
        counted = [row.flops for row in self.rows if _last(row.name) != "lm_head"]
        in_fp8 = sum(row.flops for row in self.rows if row.recipe and _last(row.name) != "lm_head")
        return math.nan if any(map(math.isnan, counted)) else in_fp8 / max(1.0, sum(counted))

    def __str__(self) -> str:
        width = max(map(len, ("linear", *(row.name for row in self.rows))))
        lines = [f"{'linear':<{width}}  {'in':>6} {'out':>6}  {'recipe':<10} reason"]
        for row in self.rows:
            shape = f"{row.in_features:>6} {row.out_features:>6}"
            lines.append(f"{row.name:<{width}}  {shape}  {row.recipe or 'bf16':<10} {row.reason}")
        return "\n".join([*lines, *self._summary()])

    def _summary(self) -> list[str]:
        """The last lines: how many linears and which share of FLOPs, and what that share counts beside linears."""
        others = [row for row in self.rows if row.kind != "linear"]
        uncounted, counted = ([r for r in others if (r.kind == "convolution") is it] for it in (True, False))
        emulated = ", emulated (operands are decoded)" if any(row.is_emulated for row in self.rows) else ""
        without_head = " (lm_head not counted)" if any(_last(row.name) == "lm_head" for row in self.rows) else ""
        of_what = f"a token's FLOPs with weights{without_head}" if others else f"linear FLOPs{without_head}"
        share = "an unknown share" if uncounted else f"{self.fp8_flop_share:.1%}"
        linears = [row for row in self.rows if row.kind == "linear"]
        num_fp8 = sum(bool(row.recipe) for row in linears)
        lines = [f"{num_fp8} of {len(linears)} linears in FP8{emulated}, {share} of {of_what}"]
        if uncounted:
            layers = _count_layers(uncounted)
            lines.append(f"convolutions not counted: their FLOPs depend on the input's size; {layers}")
        if counted:
            weights = "1 weight" if len(counted) == 1 else f"{len(counted)} weights"
            in_fp8 = sum(bool(row.recipe) for row in counted)
            also = f"; {in_fp8} of these in FP8" if in_fp8 else ""
            lines.append(f"counted with {weights} of other layers: {_count_layers(counted)}{also}")
        return [*lines, self.fusion] if self.fusion else lines


@former_keywords(skip="ignore")
def convert(
    model: nn.Module,
    recipe: Recipe | str = "blockwise",
    *,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
    exact: bool = False,
    overrides: Mapping[str, Recipe | str] | None = None,
    num_tokens: int | None = None,
) -> ConversionReport:
    """Give every linear under model a recipe of its own, in place.

    octavo's linears take it as they are; plain torch.nn.Linear modules (that very type) and transformers' Conv1D are
    replaced by octavo's, sharing their parameters. transformers' fused experts run grouped GEMMs over their 3-D
    parameters, under recipes without state. Embeddings and norms are no linears and stay in high precision. So does
    what multiplies by a weight in any other way (other 3-D parameters, convolutions, torch's attention and recurrent
    layers): the report names it, and a warning says so where that is 5 % of a token's FLOPs or more, most of the
    weights' elements, or a convolution, whose FLOPs depend on the input's size; unless ignore names it.

    Args:
        model: any module.
        recipe: a Recipe or its name; the default is autocast's.
        ignore: names left in high precision: a linear's or parameter's full name, its last part, or the full name of a
            module above, never a substring. It replaces the default: name lm_head too where that shall stay.
        exact: make the forward of linears and norms row-local in bits (needs a row-local recipe).
        overrides: other recipes for single linears, such as {"layers.0.mlp": "bf16", "down_proj": "rowwise"}: full
            names, prefixes of full names that end at a dot, or single parts of them; the most specific one decides
            (see octavo.nn.overrides.match_rank). The report names it.
        num_tokens: tokens of one forward pass; linears for which FP8 was measured to be no faster than bf16 at that
            many stay in high precision, and the report says what was measured. Overrides and experts are not asked.
    Returns:
        ConversionReport, one row a linear and one a weight of another layer; print it.
    Raises:
        RecipeError: for an unknown recipe, a name in ignore or overrides that no linear has, an override of ignored
            linears alone, exact under a recipe that has none (octavo.Numerics), or exact for a model with torch's own
            linears.
        ConfigError: for what is no module, for torch's linears whose weights are sharded already, and for a model with
            PEFT's adapters, which come after convert.
        BackendError: for a recipe that the model's GPU lacks; it says which ones that has. Nothing was changed then.
    """
    require_module(model, "convert")
    _refuse_adapters(model)
    checked_names(ignore, "ignore")
    recipe = get_recipe(recipe)
    named = {name: get_recipe(value) for name, value in (overrides or {}).items()}
    for used in (recipe, *named.values()):
        check_exact(exact, used)
    modules = model.named_modules(remove_duplicate=False)  # a module in two places is converted in both
    names = [name for name, module in modules if isinstance(module, nn.Linear | Linear) or is_conv1d(module)]
    routers = [name for name, module in model.named_modules() if isinstance(module, Router)]
    others = find_products(model)
    _check_ignored(ignore, [*names, *routers, *(name for product in others for name in (product.name, product.owner))])
    chosen = _choose(named, [*names, *(product.name for product in others if product.kind == "experts")], ignore)
    recipes = {name: _chosen_recipe(name, chosen, recipe, ignore) for name in names}
    _check_shared(model, names, recipes)
    _check_whole(model, recipes)
    for used in (recipe, *named.values()):
        require_recipe(used, _device_of(model))
    foreign = [name for name in names if not isinstance(model.get_submodule(name), Linear)]
    if exact and foreign:
        raise RecipeError(
            f"exact=True needs octavo's own linears and norms, got torch's {foreign[:5]}; load the checkpoint with "
            "octavo.load_model(path, recipe=..., exact=True)"
        )
    adopted: dict[nn.Module, Linear] = {}
    slow = {} if num_tokens is None else _slower_ones(model, names, recipe, num_tokens)
    rows = []
    for name in names:
        override, own = chosen.get(name, ("", recipe))
        why = "" if override else slow.get(name, "")
        rows.append(_convert_one(model, name, override, HIGH_PRECISION if why else own, ignore, adopted, why))
    rows += [_row(name, model.get_submodule(name), None, _ROUTER_REASON) for name in routers]
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.full_name = name
    follow_steps(model)
    disable_torch_fast_path(model, Linear)
    set_exact(model, exact)
    for product in others:
        override, own = chosen.get(product.name, ("", recipe))
        rows.append(_convert_other(model, product, override, own, ignore))
    if recipe.is_fp8:
        _warn_of_rest(rows, may_leave_all=num_tokens is not None)
    plan_fusion(model)
    return ConversionReport(tuple(rows), describe_fusion(model))


def require_module(model: nn.Module, what: str) -> None:
    """Refuse what is no model, a checkpoint's path say.

    Args:
        what: for the error: what asks for one.
    Raises:
        ConfigError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{what} takes a model, got {model!r:.80}; octavo.load_model(path) makes one of a checkpoint")


def set_exact(model: nn.Module, exact: bool) -> None:
    """Turn exact mode of every octavo linear, router and norm under model on or off."""
    for module in model.modules():
        if isinstance(module, Linear | Router | RMSNorm | LayerNorm):
            module.exact = exact


def _convert_one(
    model: nn.Module,
    name: str,
    override: str,
    recipe: Recipe,
    ignore: tuple[str, ...],
    adopted: dict[nn.Module, Linear],
    why: str = "",
) -> ConversionRow:
    linear = model.get_submodule(name)
    foreign = not isinstance(linear, Linear)
    if foreign and (other := _why_not_taken(linear)):
        reason = _IGNORED_REASON if is_ignored(name, ignore) else other
        layer = type(linear).__name__ if type(linear) is not nn.Linear else "Linear with a computed weight"
        return dataclasses.replace(_row(name, linear, None, reason), layer=layer)
    if is_ignored(name, ignore):
        if isinstance(linear, Linear):
            linear.recipe = None
        return _row(name, linear, None, _HEAD_REASON if _last(name) == "lm_head" else _IGNORED_REASON)
    if foreign and (recipe.is_fp8 or linear in adopted):
        if linear not in adopted:
            adopted[linear] = adopt(linear)
        linear = adopted[linear]
        _replace(model, name, linear)
    if isinstance(linear, Linear):
        linear.full_name = name
        linear.set_recipe(recipe)
    why = f"override {override!r}" if override else why
    if not recipe.is_fp8:
        return _row(name, linear, None, why or "the recipe is high precision")
    what = f"octavo.nn.{type(linear).__name__}"
    if foreign:
        what = "replaced Conv1D" if isinstance(linear, TransposedLinear) else "replaced torch.nn.Linear"
    row = _row(name, linear, recipe.name, f"{what}, {why}" if why else what)
    return dataclasses.replace(row, is_emulated=recipe.is_emulated)


def _why_not_taken(linear: nn.Module) -> str:
    """Why a linear of torch's stays as it is; "" where an octavo linear can take its parameters."""
    layer = type(linear)
    if layer is nn.Linear or is_conv1d(linear):
        is_own = isinstance(linear._parameters.get("weight"), nn.Parameter)
        return "" if is_own else "its weight is no Parameter: a hook computes it (pruning, weight_norm, spectral_norm)"
    if layer.forward is not nn.Linear.forward:
        return f"{layer.__name__} is a subclass of Linear with a forward of its own"
    return f"{layer.__name__} is a subclass of Linear, whose owner may read the weight and never call it"


def _convert_other(
    model: nn.Module, product: Product, override: str, recipe: Recipe, ignore: tuple[str, ...]
) -> ConversionRow:
    """The row of a weight that is no linear's; fused experts get a recipe."""
    module = model.get_submodule(product.owner)
    is_out = is_ignored(product.name, ignore) or bool(product.owner and is_ignored(product.owner, ignore))
    why = why_not_experts(module, recipe) if product.kind == "experts" else ""
    is_taken = product.kind == "experts" and recipe.is_fp8 and not (is_out or why)
    if is_taken or isinstance(module, FusedExperts):
        set_experts_recipe(module, _last(product.name), recipe if is_taken else None)
    reason = why or f"a weight of {product.layer}, which convert does not take"
    if is_taken:
        reason = "grouped GEMMs over the parameter"
    elif "Router" in product.layer:
        reason = _ROUTER_REASON
    elif product.kind == "experts" and not recipe.is_fp8:
        reason = "the recipe is high precision"
    reason = _IGNORED_REASON if is_out else f"{reason}, override {override!r}" if override else reason
    reason = f"{reason}; {product.note}" if product.note else reason
    sizes, own = (product.in_features, product.out_features), recipe.name if is_taken else None
    return ConversionRow(product.name, *sizes, own, reason, product.active_share, product.kind, product.layer)


def _warn_of_rest(rows: list[ConversionRow], *, may_leave_all: bool) -> None:
    """Say what stays in high precision without anybody having asked for it, where that is much.

    Args:
        may_leave_all: linears were compared with the speed table, which may want none of them in FP8.
    """
    rows = [row for row in rows if _last(row.name) != "lm_head"]
    counted = [row for row in rows if row.kind != "convolution"]
    wanted = (_IGNORED_REASON, _ROUTER_REASON, "the recipe is high precision")
    left = [row for row in rows if row.layer and not row.recipe and not row.reason.startswith(wanted)]
    flops = sum(row.flops for row in left if row.kind != "convolution") / max(1.0, sum(row.flops for row in counted))
    elements = sum(row.num_elements for row in left) / max(1, sum(row.num_elements for row in rows))
    if flops >= _MUCH or elements > _MOST or any(row.kind == "convolution" for row in left):
        is_known = len(counted) == len(rows)
        share = f"{flops:.1%}" if is_known else "an unknown share"
        why = "" if is_known else ", and a convolution's FLOPs depend on the input's size"
        warnings.warn(
            f"convert left {share} of a token's FLOPs in high precision: it takes torch.nn.Linear, octavo's linears "
            f"and transformers' experts, and these weights are of other layers: {_count_layers(left)}; they have "
            f"{elements:.1%} of all weights' elements{why}. The report has them one by one. Name them in ignore where "
            "this is wanted",
            stacklevel=4,
        )
    elif not may_leave_all and not any(row.recipe for row in rows):
        num = sum(row.kind == "linear" for row in rows)
        warnings.warn(
            "convert left every layer in high precision: it takes torch.nn.Linear and octavo's linears, and "
            + (f"skipped all {num} that it found; the report has the reasons" if num else "found none"),
            stacklevel=4,
        )


def _count_layers(rows: list[ConversionRow]) -> str:
    """How many weights of which types of layers: "4 of MixtralExperts, 2 of LSTM"."""
    return ", ".join(f"{num} of {layer}" for layer, num in Counter(row.layer for row in rows).items())


def disable_torch_fast_path(model: nn.Module, kind: type[nn.Module]) -> None:
    """Have torch's encoder layers call linears of a kind: without gradients they would read their weights and skip
    them."""
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and any(
            isinstance(linear, kind) for linear in (layer.linear1, layer.linear2)
        ):
            layer.activation_relu_or_gelu = 0  # what torch asks before it takes its fused path, and for nothing else


def _slower_ones(model: nn.Module, names: list[str], recipe: Recipe, num_tokens: int) -> dict[str, str]:
    """Linears that the speed table leaves in high precision -> what it says."""
    if num_tokens < 1:
        raise RecipeError(f"num_tokens must be at least 1, got {num_tokens}")
    reasons: dict[str, str] = {}
    for name in names if recipe.is_fp8 else ():
        linear = model.get_submodule(name)
        found = measured_speedup(recipe.name, num_tokens, *linear_sizes(linear))
        if found is None:
            reasons[name] = f"smaller than anything at which {recipe.name} was measured to win"
        elif found.speedup <= 1.0:
            shape = f"{found.num_tokens} tokens x {found.in_features} x {found.out_features}"
            reasons[name] = f"{recipe.name} was measured at {found.speedup:.2f}x of bf16 at {shape} ({found.device})"
    return reasons


def _choose(
    overrides: Mapping[str, Recipe], names: list[str], ignore: tuple[str, ...]
) -> dict[str, tuple[str, Recipe]]:
    """Linear -> (the override that decides on it, its recipe)."""
    chosen = resolve(overrides, names, "overrides")
    for pattern in overrides:
        meant = [name for name in names if match_rank(pattern, name) is not None]
        if all(is_ignored(name, ignore) for name in meant):
            left_out = ", ".join(meant)
            raise RecipeError(f"override {pattern!r} changes nothing: ignore leaves out {left_out}; shorten ignore")
    return chosen


def _chosen_recipe(
    name: str, chosen: Mapping[str, tuple[str, Recipe]], recipe: Recipe, ignore: tuple[str, ...]
) -> Recipe | None:
    return None if is_ignored(name, ignore) else chosen.get(name, ("", recipe))[1]


def _check_shared(model: nn.Module, names: list[str], recipes: Mapping[str, Recipe | None]) -> None:
    """A linear in several places has one recipe."""
    first: dict[nn.Module, str] = {}
    for name in names:
        other = first.setdefault(model.get_submodule(name), name)
        if recipes[other] != recipes[name]:
            raise RecipeError(
                f"{other} and {name} are one linear, and ignore or overrides give them different recipes; name both"
            )


def _check_whole(model: nn.Module, recipes: Mapping[str, Recipe | None]) -> None:
    """Refuse to replace linears that another engine, FSDP2, tensor parallelism or ZeRO-3, has taken in hand."""
    for name, recipe in recipes.items():
        linear = model.get_submodule(name)
        is_taken = recipe is not None and recipe.is_fp8 and not isinstance(linear, Linear)
        if is_taken and hasattr(linear, "ds_id"):  # what its ZeRO-3 hooks ask of a module, and a new one lacks
            raise ConfigError(
                f"convert replaces torch.nn.Linear, and DeepSpeed's ZeRO-3 follows {name} already; call octavo.convert "
                "first, then deepspeed.initialize"
            )
        if is_taken and hasattr(linear._parameters.get("weight"), "device_mesh"):
            raise ConfigError(
                f"convert replaces torch.nn.Linear, and {name} is sharded already (its weight is a DTensor); call "
                "octavo.convert first, then octavo.parallel.shard or fully_shard, or parallelize_module with the "
                "styles of octavo.parallel.styles"
            )


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse layers of PEFT's: their adapters are linears that stay in high precision, and merging writes unseen."""
    for name, module in model.named_modules():
        if "base_layer" in module._modules and any(
            kind.__module__.startswith("peft.") for kind in type(module).__mro__
        ):
            raise ConfigError(
                f"{name or 'this layer'} has PEFT's adapters already; convert the base first: "
                "octavo.convert(model, recipe), then octavo.integrations.peft.get_peft_model(model, config)"
            )


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def is_ignored(name: str, ignore: tuple[str, ...]) -> bool:
    """Whether convert's ignore means a linear: by its full name, its last part or a module above."""
    return any(name == left_out or _last(name) == left_out or name.startswith(f"{left_out}.") for left_out in ignore)


def _row(name: str, linear: nn.Module, recipe: str | None, reason: str) -> ConversionRow:
    active = linear.active_share if isinstance(linear, GroupedLinear) else 1.0
    return ConversionRow(name, *linear_sizes(linear), recipe, reason, active)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    if not name:
        raise RecipeError("convert changes the linears under a module; a single torch.nn.Linear has none under it")
    setattr(model.get_submodule(parent), child, module)


def _check_ignored(ignore: tuple[str, ...], names: list[str]) -> None:
    for name in ignore:
        if name not in DEFAULT_IGNORE and not any(is_ignored(linear, (name,)) for linear in names):
            nearest = name_nearest(name, (*names, *map(_last, names)))
            raise RecipeError(
                f"ignore names no linear of this model: {name!r}; a name is a full name, that of a module above, or "
                f"the last part of one, without wildcards{nearest}"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
