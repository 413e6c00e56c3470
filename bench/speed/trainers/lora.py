"""PEFT's LoRA over a whole 8B model whose base is held as FP8 codes alone, against one in bf16: memory and time."""

import importlib.metadata

import torch

from bench.speed.trainers.variants import (
    TIMED_STEPS,
    WARM_UP_STEPS,
    Step,
    TrainersSession,
    Variants,
    compile_layers,
    make_llama,
    make_optimizer,
    optimizer_update,
    recipe_of_loops,
    training_step,
)

_RANK = 16
_WHOLE = {"num_hidden_layers": 32, "vocab_size": 128_256}  # of Llama-3-8B, beside the other parts' sizes


def lora(session: TrainersSession) -> None:
    """bf16, then each recipe."""
    session.describe(
        f"lora: a step of PEFT {importlib.metadata.version('peft')}'s LoRA, rank {_RANK} on all linears but the head, "
        f"adapters in bf16, over LlamaForCausalLM of transformers {importlib.metadata.version('transformers')} in "
        "Llama-3-8B's shape, random weights in bf16, or octavo's codes alone after octavo.nn.keep_codes_only; 1 x 4096 "
        "random tokens. Each decoder layer under torch.compile and gradient checkpointing (use_reentrant=False, "
        "context_fn=octavo.nn.recompute_all), the loss under torch.compile, cuDNN's attention, torch's fused AdamW, no "
        "clipping, delayed with update_every='step', in all alike. Embedding and head are in bf16. Median of "
        f"{TIMED_STEPS} steps after {WARM_UP_STEPS}, each waited for; the peak is that of the timed steps."
    )
    variants = Variants(session, "lora")
    for recipe in ("bf16", *session.recipes):
        variants.run(recipe, lambda _, name=recipe: _build(session, name))  # type: ignore[misc]


def _build(session: TrainersSession, recipe: str) -> Step:
    import peft

    import octavo
    from octavo.integrations.peft import get_peft_model

    model = make_llama(session, **_WHOLE)
    config = peft.LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear")
    if recipe == "bf16":
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    else:
        octavo.convert(model, recipe_of_loops(recipe))
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        octavo.nn.keep_codes_only(adapted)
    checkpointing = {"use_reentrant": False, "context_fn": octavo.nn.recompute_all}
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    compile_layers(session, adapted.train())
    if session.compiled and session.kind == "cuda":
        model.loss_function = torch.compile(model.loss_function)
    ids = session.tokens(1, 4096, model.config.vocab_size)
    return training_step(session, adapted, ids, torch.Tensor.backward, optimizer_update(make_optimizer(adapted)))
