"""DeepSpeed's ZeRO-2 over the ranks, FP8 against bf16."""

import contextlib
import importlib
import importlib.metadata

from bench.speed.trainers.variants import (
    MODEL,
    TIMED_STEPS,
    WARM_UP_STEPS,
    Step,
    TrainersSession,
    Variants,
    compile_layers,
    make_llama,
    make_optimizer,
    recipe_of_loops,
    training_step,
)


def deepspeed(session: TrainersSession) -> None:
    """bf16, then each recipe."""
    session.describe(
        f"deepspeed: a step of DeepSpeed {importlib.metadata.version('deepspeed')}'s engine under ZeRO-2 with section "
        f"bf16, LlamaForCausalLM of transformers {importlib.metadata.version('transformers')}, {MODEL}, 2 x 8192 "
        "random tokens a GPU. Each decoder layer under torch.compile, cuDNN's attention, torch's fused AdamW on "
        "DeepSpeed's fp32 masters, no clipping, delayed with update_every='step', in all alike. The head is in bf16. "
        f"Median of {TIMED_STEPS} steps after {WARM_UP_STEPS}, each waited for."
    )
    variants = Variants(session, "deepspeed")
    for recipe in ("bf16", *session.recipes):
        variants.run(recipe, lambda stack, name=recipe: _build(session, name, stack))  # type: ignore[misc]


def _build(session: TrainersSession, recipe: str, stack: contextlib.ExitStack) -> Step:
    import octavo
    from octavo.integrations.deepspeed import initialize

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    model = make_llama(session)
    if recipe == "bf16":
        initialize = importlib.import_module("deepspeed").initialize  # octavo's asks for a converted model
    else:
        octavo.convert(model, recipe_of_loops(recipe))
    compile_layers(session, model.train())
    engine = initialize(model=model, optimizer=make_optimizer(model), config=settings)[0]
    stack.callback(engine.destroy)
    ids = session.tokens(2, 8192, model.config.vocab_size, seed=1 + session.mesh.rank)
    return training_step(session, engine, ids, engine.backward, engine.step)
