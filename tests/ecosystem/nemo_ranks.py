"""What the ranks of test_nemo.py do: the same steps of a small Llama by NeMo AutoModel's recipe and in plain torch."""

import logging
import warnings
from pathlib import Path
from typing import Any

import tests.ecosystem.nemo_cpu  # noqa: F401 - before a recipe

# isort: split
import torch
import torch.distributed as dist
from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.datasets.utils import default_collater
from nemo_automodel.components.models.common.utils import BackendConfig
from nemo_automodel.components.models.llama.model import LlamaForCausalLM
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaConfig

import octavo
from octavo.integrations.nemo import NemoQuantizer
from octavo.nn import check_weights, mark_weights_updated, update_scales
from tests.ecosystem.launched import ROOT
from tests.ecosystem.plain_run import STEPS, Case, recipe_of, said_to

EXAMPLE = ROOT / "examples" / "nemo" / "llama_fp8.yaml"
BATCH, TOKENS, VOCAB = 2, 16, 64
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": False,
}
BACKEND = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch"}  # NeMo's default norm is compiled
LINEARS = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")
MODELS = "nemo_automodel.NeMoAutoModelForCausalLM."
OPTIMIZERS = {  # by where updates are summed up: in the bf16 weights, or in fp32 masters
    "bf16": ("torch.optim.AdamW", {"lr": 1e-3, "fused": True}),
    "fp32": ("octavo.optim.AdamW", {"lr": 1e-3}),
}


class Tokens(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Rows of token ids that each are the last one plus one."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        source = torch.Generator().manual_seed(index)
        ids = (torch.randint(VOCAB, (1,), generator=source) + torch.arange(TOKENS + 1)) % VOCAB
        return {"input_ids": ids[:-1].tolist(), "labels": ids[1:].tolist()}


class Recipe(TrainFinetuneRecipeForNextTokenPrediction):
    """NeMo's own, which keeps its losses."""

    def log_train_metrics(self, log_data: Any) -> None:
        self.__dict__.setdefault("losses", {})[log_data.step] = log_data.metrics["loss"]
        super().log_train_metrics(log_data)


def config_of(case: Case, folder: Path, until: int = STEPS, **sections: Any) -> ConfigNode:
    """A recipe's YAML, as NeMo reads it."""
    optimizer, options = OPTIMIZERS[case.dtype]
    recipe = {"_target_": "tests.ecosystem.plain_run.recipe_of", "name": case.recipe}
    return ConfigNode(
        {
            "seed": 1,
            "dist_env": {"backend": "gloo"},
            "step_scheduler": {
                "local_batch_size": BATCH,
                "global_batch_size": BATCH * case.accumulation * dist.get_world_size(),
                "max_steps": until,
                "num_epochs": 1,
                "ckpt_every_steps": STEPS // 2,
            },
            "model": {
                "_target_": f"{MODELS}from_config",
                "config": {"_target_": "transformers.LlamaConfig", **SIZES},
                "torch_dtype": "bfloat16",
                "backend": BACKEND,
            },
            "distributed": {"strategy": "fsdp2" if case.stage == 3 else "ddp"},
            "qat": {
                "enabled": True,
                "qat_config": {"_target_": "octavo.integrations.nemo.NemoQuantizer", "recipe": recipe},
            },
            "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
            "dataset": {"_target_": "tests.ecosystem.nemo_ranks.Tokens", "tokenizer": None},
            "dataloader": {"shuffle": False},
            "optimizer": {"_target_": optimizer, **options},
            "clip_grad_norm": {"max_norm": 1e9},
            "checkpoint": {"enabled": case.resumed, "checkpoint_dir": str(folder)},
            **sections,
        }
    )


def run(config: ConfigNode) -> tuple[dict[int, float], dict[str, torch.Tensor], nn.Module]:
    """Losses by step, the weights before the first of them, and the model."""
    recipe = Recipe(config)
    recipe.setup()
    (model,) = recipe.model_parts
    first = whole(model)
    recipe.run_train_validation_loop()
    check_weights(model)
    return recipe.losses, first, model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("module."): weight.detach() for name, weight in model.named_parameters()}
    return {name: w.full_tensor() if hasattr(w, "full_tensor") else w.clone() for name, w in found.items()}


def by_recipe(case: Case, folder: Path) -> tuple[dict[int, float], Any, Any]:
    """Losses, first and last weights; a resumed run is that of a new recipe."""
    losses, first = {}, None
    if case.resumed:
        losses, first, _ = run(config_of(case, folder, STEPS // 2))
    more, weights, model = run(config_of(case, folder))
    assert sorted(losses | more) == list(range(STEPS)) and not set(losses) & set(more)
    return losses | more, first or weights, whole(model)


def plain_model(weights: dict[str, torch.Tensor]) -> nn.Module:
    """NeMo's own class, built without the rest of NeMo."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES), backend=BackendConfig(**BACKEND))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = weights[name].clone()
    return model


def batch(place: int, rank: int, world_size: int) -> tuple[dict[str, Any], torch.Tensor]:
    rows = [Tokens()[(place * BATCH + i) * world_size + rank] for i in range(BATCH)]
    found = default_collater(rows)
    labels = found.pop("labels")
    return found, labels


def plain(case: Case, first: dict[str, torch.Tensor], rank: int, world_size: int) -> tuple[dict[int, float], Any]:
    """Losses and last weights in plain torch. FSDP2 adds micro-batches up in fp32, and DDP and one process in bf16."""
    model = plain_model(first)
    octavo.convert(model, recipe_of(case.recipe))
    is_sharded = case.stage == 3 and world_size > 1
    kind, options = OPTIMIZERS[case.dtype]
    optimizer = {"torch": torch.optim.AdamW, "octavo": octavo.optim.AdamW}[kind.split(".")[0]](
        model.parameters(), **options
    )
    losses, tokens = {}, BATCH * TOKENS * case.accumulation * world_size
    for step in range(STEPS):
        parts, sums = [], []
        for part in range(case.accumulation):
            inputs, labels = batch(step * case.accumulation + part, rank, world_size)
            logits = model(**inputs).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / tokens
            parts.append(loss.detach())
            (loss * world_size).backward()
            if is_sharded:
                grads = [parameter.grad.float() for parameter in model.parameters()]
                sums = [total + grad for total, grad in zip(sums, grads, strict=True)] if sums else grads
                model.zero_grad()
        for parameter, total in zip(model.parameters(), sums or [p.grad for p in model.parameters()], strict=True):
            if world_size > 1:
                dist.all_reduce(total)
                total /= world_size
            parameter.grad = total.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
        mark_weights_updated(model)
        update_scales(model)
        total = torch.stack(parts).sum()
        if world_size > 1:
            dist.all_reduce(total)
        losses[step] = total.item()
    return losses, whole(model)


def compare(rank: int, cases: list[Case], folder: Path) -> list[Any]:
    """(losses by the recipe, in plain torch, names of weights that differ in bits) of each case."""
    results = []
    for i, case in enumerate(cases):
        mine, first, weights = by_recipe(case, folder / str(i))
        theirs, others = plain(case, first, rank, dist.get_world_size())
        results.append((mine, theirs, [name for name in others if not torch.equal(weights[name], others[name])]))
    return results


def refusals(folder: Path) -> dict[str, str]:
    """What is said to each mistake that one rank can make."""
    case = Case(3, "blockwise", "bf16", 1)
    lora = LlamaForCausalLM(LlamaConfig(**SIZES), backend=BackendConfig(**BACKEND))
    apply_lora_to_linear_modules(lora, PeftConfig(target_modules=["*_proj"], dim=4))
    run(config_of(case._replace(resumed=True), folder / "blockwise", 2))
    delayed = case._replace(recipe="delayed", resumed=True)
    return {
        "torchao": told(case, fp8={"enabled": True, "recipe_name": "tensorwise", "emulate": True}),
        "lora": said_to(lambda: NemoQuantizer().prepare(lora)),
        "no model of NeMo's": said_to(lambda: NemoQuantizer("delayed").prepare(nn.Sequential(nn.Linear(16, 16)))),
        "ignore": said_to(lambda: NemoQuantizer(ignore=("wq",)).prepare(nn.Sequential(nn.Linear(16, 16)))),
        "selective": told(case, distributed={"strategy": "fsdp2", "activation_checkpointing": "selective"}),
        "no state": said_to(lambda: run(config_of(delayed, folder / "blockwise", 4))),
    }


def without_state(folder: Path) -> dict[int, float]:
    """Losses of a run by delayed scaling that goes on from what refusals has saved."""
    config = config_of(Case(3, "delayed", "bf16", 1, resumed=True), folder / "blockwise", 4)
    config.qat.qat_config.fp8_state = False
    return run(config)[0]


def told(case: Case, **sections: Any) -> str:
    return said_to(lambda: Recipe(config_of(case, Path(), **sections)).setup())


def refusals_of_two(folder: Path) -> dict[str, str]:
    """What is said to each mistake of two ranks."""
    case = Case(3, "blockwise", "bf16", 1)
    sizes = {name: {"strategy": "fsdp2", f"{name}_size": 2} for name in ("tp", "pp")}
    sizes["pp"]["pipeline"] = {"pp_microbatch_size": 1}
    recipe = Recipe(config_of(case, folder, qat={"enabled": False}))
    recipe.setup()
    found = {name: told(case, distributed=sections) for name, sections in sizes.items()}
    found["megatron"] = told(case, distributed={"strategy": "megatron_fsdp"})
    return found | {"sharded": said_to(lambda: NemoQuantizer().prepare(recipe.model_parts[0]))}


def leaving(folder: Path) -> dict[str, Any]:
    """A run by octavo, the same run gone on with by NeMo alone, and what lies on disk."""
    case = Case(3, "delayed", "fp32", 1, resumed=True)
    losses, first, model = run(config_of(case, folder, STEPS // 2))
    theirs, _, plain_one = run(config_of(case, folder, qat={"enabled": False}))
    state = FileSystemReader(folder / f"epoch_0_step_{STEPS // 2 - 1}" / "octavo_fp8").read_metadata()
    paths = [folder / f"epoch_0_step_{each - 1}" / "model" / "consolidated" for each in (STEPS // 2, STEPS)]
    loaded = {"_target_": f"{MODELS}from_pretrained", "backend": BACKEND}
    loaded |= {"pretrained_model_name_or_path": str(paths[1])}
    recipe = Recipe(config_of(Case(3, "blockwise", "bf16", 1), folder / "loaded", model=loaded))
    recipe.setup()
    (again,) = recipe.model_parts
    return {
        "losses": losses | theirs,
        "state": {name.rpartition(".")[2] for name in state.state_dict_metadata},
        "keys": (list(first), list(whole(plain_one))),
        "is_octavos": any(isinstance(module, octavo.nn.Linear) for module in plain_one.modules()),
        "exported": [load_file(next(path.glob("*.safetensors"))) for path in paths],
        "weights": (whole(model), whole(plain_one)),
        "loaded": whole(again),
        "codes": {name: again.get_submodule(name).quantized_weight()[0] for name in LINEARS},
    }


def initial(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights that NeMo makes, with octavo and without."""
    case, found = Case(3, "blockwise", "bf16", 1), []
    for is_on in (True, False):
        config = config_of(case, folder)
        config.qat.enabled = is_on
        recipe = Recipe(config)
        recipe.setup()
        found.append(whole(recipe.model_parts[0]))
    return found[0], found[1]


def recomputed(folder: Path) -> list[dict[int, float]]:
    """Losses with NeMo's activation checkpointing and without."""
    case = Case(3, "delayed-step", "bf16", 1)
    sections = [{"strategy": "fsdp2", "activation_checkpointing": is_on} for is_on in (True, False)]
    return [run(config_of(case, folder, 5, distributed=each))[0] for each in sections]


def example_options(folder: Path, steps: int) -> list[str]:
    """What the example is given in the command line, to run on a CPU."""
    options = {
        "checkpoint.checkpoint_dir": folder,
        "dist_env.backend": "gloo",
        "model.backend.rms_norm": "torch",  # a compiled one takes half a minute
        "qat.qat_config.recipe": "delayed",
        "step_scheduler.global_batch_size": 8,
        "step_scheduler.max_steps": steps,
    }
    return [each for name, value in options.items() for each in (f"--{name}", str(value))]


def ranks(rank: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """What one rank shows, or several."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    places = Path(folder)
    found = {"cases": compare(rank, cases, places), "initial": initial(places)}
    found |= {"recomputed": recomputed(places)}
    if dist.get_world_size() == 1:
        found |= {"said": refusals(places), "without_state": without_state(places)}
        found |= {"leaving": leaving(places / "leaving")}
    else:
        options = [*example_options(places, 40), "--checkpoint.enabled", "false"]
        found |= {"example": run(parse_args_and_load_config(str(EXAMPLE), options))[0]}
        found |= {"said": refusals_of_two(places)}
    dist.barrier()
    dist.destroy_process_group()
    return found
