"""What else the ranks of test_megatron.py show: checkpoints, codes, experts, pipelines, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import octavo
from octavo.errors import OctavoError
from octavo.numerics import get_recipe
from tests.ecosystem.megatron_plain import LAYERS, SEQ
from tests.ecosystem.megatron_ranks import (
    BATCH,
    Case,
    Run,
    batches,
    begin,
    begin_parallel,
    compare,
    config,
    end,
    gpt,
    loss_of,
    plain,
    weights_of,
)

FEW = 5  # steps


def left() -> dict[str, Any]:
    """Keys of Megatron's own model and of octavo's, before and after the other's weights were loaded; two losses."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    begin_parallel()
    case = Case("delayed", 1)
    run, theirs = Run(case), gpt(config(), get_gpt_layer_local_spec(), seed=5)
    ids = batches(case)[0]
    run.steps([ids] * 3)
    keys = list(run.model.state_dict()), list(theirs.state_dict())
    theirs.load_state_dict(run.model.state_dict())
    run.model.eval()  # in high precision, all else is Megatron's
    with octavo.autocast(enabled=False), torch.no_grad():
        losses = [loss_of(_called(model), ids).item() for model in (run.model, theirs)]
    again = Run(case, seed=6)
    again.model.load_state_dict(theirs.state_dict())
    return {"keys": keys, "losses": losses, "same": _equal(run.model, again.model)}


def _called(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    return lambda ids: model(ids, torch.arange(SEQ).expand_as(ids), mask)


def _few_losses(model: Any, ids: torch.Tensor) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(FEW):
        loss = loss_of(_called(model), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    octavo.nn.check_weights(model)
    return losses


def _equal(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = weights_of(model), weights_of(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine if "_extra_state" not in name)


def codes() -> list[tuple[torch.Tensor, ...]]:
    """(codes and scales of a trained bf16 model's linear, octavo.quantize of its exported weight) of each linear."""
    begin_parallel()
    case = Case("blockwise", 1, dtype="bf16")
    run = Run(case)
    run.steps(batches(case)[:3])
    exported, scaling, found = run.model.state_dict(), get_recipe("blockwise").weight, []
    for name, module in run.model.named_modules():
        if isinstance(module, octavo.nn.Linear):
            (held,) = module.quantized_weight()
            wanted = octavo.quantize(exported[name.removesuffix("fp8") + "weight"], scaling)
            found.append((held.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8), held.scale, wanted.scale))
    return found


def resharded(folder: Path) -> dict[str, Any]:
    """Logits by two tensor-parallel ranks, and of their checkpoint by each rank alone; histories before and after."""
    from megatron.core import dist_checkpointing

    begin_parallel(tensor_model_parallel_size=2)
    case = Case("delayed", 1, "tensor")
    run, ids = Run(case), batches(case)[0]
    run.steps([ids] * 3)
    run.model.eval()
    with octavo.autocast(enabled=False), torch.no_grad():
        before = run.forward(ids[:, :-1])
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    run.save(folder)
    saved = octavo.nn.fp8_state_dict(run.model)
    begin_parallel(tensor_model_parallel_size=1)
    alone = Run(Case("delayed", 1), seed=7)
    alone.model.load_state_dict(dist_checkpointing.load(alone._sharded(True), str(folder))["model"])
    alone.model.eval()
    with octavo.autocast(enabled=False), torch.no_grad():
        after = alone.forward(ids[:, :-1])
    loaded = octavo.nn.fp8_state_dict(alone.model)
    return {"before": before, "after": after, "state": all(torch.equal(saved[name], loaded[name]) for name in saved)}


def recomputed() -> list[list[float]]:
    """Losses with delayed scaling, without and with Megatron's full recomputation."""
    from octavo.integrations.megatron import gpt_layer_spec

    begin_parallel()
    ids, losses = batches(Case("", 1))[0], []
    for fields in ({}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}):
        model = gpt(config(**fields), gpt_layer_spec("delayed"))
        losses.append(_few_losses(model, ids))
    return losses


def fused_norms() -> dict[str, Any]:
    """Keys and losses of a model whose norms are in the linears, beside those of one with the same weights."""
    from octavo.integrations.megatron import gpt_layer_spec

    num_ranks = dist.get_world_size()
    begin_parallel(tensor_model_parallel_size=num_ranks)
    settings = config(tensor_model_parallel_size=num_ranks)
    apart, fused = (gpt(settings, gpt_layer_spec("blockwise", fuse_norms=is_fused)) for is_fused in (False, True))
    weights = apart.state_dict()
    for name in list(weights):
        norm, _, last = name.rpartition(".")
        into = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
        if place := into.get(norm.rpartition(".")[2]):
            weights[f"{norm.rpartition('.')[0]}.{place}.layer_norm_{last}"] = weights.pop(name)
    fused.load_state_dict(weights)
    ids, losses = batches(Case("", 1, "tensor"))[0], []
    sharded = [_sharded_keys(model) for model in (apart, fused)]
    for model in (apart, fused):
        losses.append(_few_losses(model, ids))
    return {"keys": list(fused.state_dict()), "sharded": sharded, "losses": losses}


def experts() -> dict[str, Any]:
    """Losses of a model with experts in bf16, one after the other in FP8, and together; keys of checkpoints."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from octavo.integrations.megatron import gpt_layer_spec

    parallel = {"expert_model_parallel_size": dist.get_world_size()}
    begin_parallel(**parallel)
    ids, losses, keys = batches(Case("", 1, "tensor"))[0], {}, {}
    fields: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 128,
        "moe_layer_freq": [0, 1],
        "moe_token_dispatcher_type": "allgather",
        "moe_router_dtype": "fp32",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        **parallel,
    }
    for name, recipe, grouped in (
        ("bf16", "bf16", False),
        ("one by one", "blockwise", False),
        ("grouped", "blockwise", True),
        ("delayed", "delayed", False),
    ):
        model = gpt(config(moe_grouped_gemm=grouped, **fields), gpt_layer_spec(recipe))
        losses[name], keys[name] = _few_losses(model, ids), _sharded_keys(model)
    settings = config(**fields)
    keys["Megatron's"] = _sharded_keys(gpt(settings, get_gpt_decoder_block_spec(settings, False, "RMSNorm")))
    return {"losses": losses, "keys": keys}


def _sharded_keys(model: Any) -> list[str]:
    """Of a distributed checkpoint of the model."""
    return sorted(value.key for value in model.sharded_state_dict().values())


def pipeline(recipe: str) -> tuple[list[float], list[float]]:
    """Losses of two stages under Megatron's schedule, and in plain torch on one rank without delayed scaling."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    begin_parallel(pipeline_model_parallel_size=2)
    case = Case(recipe, 4, "stages")
    run = Run(case)
    began = _whole(weights_of(run.model))
    run.config.finalize_model_grads_func = finalize_model_grads
    inputs, losses = iter(batches(case)[: 4 * FEW]), []

    def step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
        ids = next(data)
        out = model(ids[:, :-1], torch.arange(SEQ).expand(BATCH, SEQ), None)

        def loss_func(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            loss = loss_of(lambda _: logits, ids)
            return loss, {"loss": loss.item()}

        return out, loss_func

    run_steps = get_forward_backward_func()
    for _ in range(FEW):
        run.ddp.zero_grad_buffer()
        run.optimizer.zero_grad()
        found = run_steps(
            forward_step_func=step,
            data_iterator=inputs,
            model=[run.ddp],
            num_microbatches=4,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        losses += [one["loss"] for one in found]
        run.optimizer.step()
    theirs = (
        plain(case._replace(recipe="blockwise"), began)[: len(losses)]
        if parallel_state.is_pipeline_last_stage()
        else []
    )
    return losses, theirs


def _whole(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of both stages, with the layers' numbers in the whole model."""
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, weights)
    of_stage = LAYERS // len(stages)
    whole = {}
    for i, stage in enumerate(stages):
        for name, value in stage.items():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = str(int(parts[2]) + i * of_stage)
            whole[".".join(parts)] = value
    return whole


def recipes() -> dict[str, Any]:
    """What the flags mean: the recipe of each layer of four, the ends in bf16; that of delayed scaling's flags."""
    from octavo.integrations.megatron import gpt_layer_spec, recipe_of

    begin_parallel()
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2}
    model = gpt(config(num_layers=4, fp8="e4m3", fp8_recipe="blockwise", **ends), gpt_layer_spec())
    linears = {name: module for name, module in model.named_modules() if isinstance(module, octavo.nn.Linear)}
    of_layers = [{m.recipe for n, m in linears.items() if f"layers.{i}." in n} for i in range(4)]
    delayed = {"fp8_margin": 1, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max", "fp8_wgrad": False}
    return {
        "layers": [[recipe and recipe.name for recipe in found] for found in of_layers],
        "delayed": recipe_of(config(fp8="hybrid", **delayed)),
        "default": recipe_of(config(fp8="hybrid")),
        "tensorwise": recipe_of(config(fp8="e4m3", fp8_recipe="tensorwise")),
        "none": recipe_of(config()),
    }


def refusals() -> dict[str, str]:
    """What is said to each mistake."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from octavo.integrations.megatron import OctavoSpecProvider, OctavoTransformerLayer, gpt_layer_spec
    from octavo.integrations.megatron.layer import _submodules

    begin_parallel()
    said = {}

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except OctavoError as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "nothing"

    fp8 = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    for name, fields in {
        "fp8 parameters": {**fp8, "fp8_param": True},
        "fp8 attention": {**fp8, "fp8_dot_product_attention": True},
        "fp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
        "fused gradients": {"gradient_accumulation_fusion": True},
        "custom": {**fp8, "fp8_recipe": "custom", "fp8_quantizer_factory": "a.b"},
        "an unused flag": {**fp8, "fp8_margin": 1},
        "recomputation": {**fp8, "recompute_granularity": "full", "recompute_method": "uniform"},
    }.items():
        settings = config()
        for field, value in fields.items():  # apart from Megatron's own checks, which ask for TransformerEngine
            setattr(settings, field, value)
        attempt(name, lambda settings=settings: gpt(settings, gpt_layer_spec()))
    attempt("two recipes", lambda: gpt(config(**fp8), gpt_layer_spec("rowwise")))
    attempt("no recipe", lambda: gpt_layer_spec("blokwise"))
    step = get_recipe("delayed", update_every="step")
    attempt("scales by the step", lambda: gpt(config(), gpt_layer_spec(step)))
    ends = config(**fp8, first_last_layers_bf16=True)
    parts = _submodules(ends, OctavoSpecProvider(), False)
    outside = gpt(ends, ModuleSpec(module=TransformerLayer, submodules=parts))
    attempt("a linear in no layer", lambda: _called(outside)(torch.zeros(1, SEQ, dtype=torch.int64)))

    bias = config(num_moe_experts=2, moe_grouped_gemm=True)
    attempt("experts with a bias", lambda: gpt(bias, gpt_layer_spec("blockwise")))
    other = type("TELinear", (ColumnParallelLinear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    mixed = _submodules(config(), OctavoSpecProvider(), False)
    mixed.self_attention.submodules.linear_qkv = other
    attempt("two backends", lambda: OctavoTransformerLayer(config(), mixed, recipe="blockwise"))
    return said


def converted() -> dict[str, Any]:
    """What octavo.convert does to a model of octavo's layers, and says to one of Megatron's own."""
    import warnings

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from octavo.integrations.megatron import gpt_layer_spec

    begin_parallel()
    model = gpt(config(), gpt_layer_spec("blockwise"))
    report = octavo.convert(model, "rowwise")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        octavo.convert(gpt(config(), get_gpt_layer_local_spec()), "rowwise")
    recipes = {row.name: row.recipe for row in report.rows if row.name.endswith(".fp8")}
    return {"recipes": recipes, "said": [str(one.message) for one in caught]}


def state_is_needed() -> list[str]:
    """Warnings where a model with delayed scaling loads Megatron's own weights."""
    import warnings

    from octavo.integrations.megatron import gpt_layer_spec
    from octavo.integrations.megatron.linear import _warn_of_no_state

    begin_parallel()
    _warn_of_no_state.cache_clear()
    weights = gpt(config(), gpt_layer_spec("blockwise")).state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpt(config(), gpt_layer_spec("delayed")).load_state_dict(weights)
    return [str(one.message) for one in caught]


def alone(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """All that one rank shows."""
    begin()
    results = {
        "cases": compare(cases, Path(folder)),
        "left": left(),
        "codes": codes(),
        "experts": experts(),
        "fused norms": fused_norms(),
        "recomputed": recomputed(),
        "recipes": recipes(),
        "refusals": refusals(),
        "converted": converted(),
        "no state": state_is_needed(),
    }
    end()
    return results


def together(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """What two ranks show."""
    begin()
    results = {
        "cases": compare(cases, Path(folder)),
        "resharded": resharded(Path(folder, "resharded")),
        "experts": experts(),
        "fused norms": fused_norms(),
        "pipeline": {recipe: pipeline(recipe) for recipe in ("blockwise", "delayed")},
    }
    end()
    return results
