"""verl's keys of rollout, optimizer, precision, data and the run, where several mean something together."""

from pathlib import Path

from octavo.integrations.config.reader import Reader, is_set
from octavo.integrations.config.verl_keys import ACTOR, MODEL, OPTIM, ROLLOUT, STALENESS, TRANSFORMER, VERIFIERS
from octavo.numerics.recipe import FORMAT_RECIPES, get_recipe

KV_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8"}
_FILTER = "data.filter_overlong_prompts"
_NEEDS_FILES = "it belongs to questions from a file; give data.train_files"


def read_samples(reader: Reader) -> None:
    name = f"{ROLLOUT}.n"
    n = reader.take(name, int, 1)
    if n < 2:
        reader.refuse(
            name, "a group needs at least 2 answers to be compared; give more", "1", "rollout.samples_per_prompt"
        )
        return
    reader.put("rollout.samples_per_prompt", n, name)


def read_mini_batch_size(reader: Reader) -> None:
    name = f"{ACTOR}.ppo_mini_batch_size"
    size = reader.take(name, int, 256)
    prompts = reader.held("rollout.prompts_per_step")
    if not reader.is_given(name) and is_set(reader.base, "trainer.minibatches"):
        return
    if size < 1 or prompts % size:
        why = f"it must divide data.train_batch_size, which is {prompts}; make it do so"
        reader.refuse(name, why, "256", "trainer.mini_batch_size")
        return
    reader.put("trainer.mini_batch_size", size, name)


def num_minibatches(reader: Reader) -> int:
    """Optimizer steps a rollout step, by what was read so far."""
    size = reader.held("trainer.mini_batch_size")
    count: int = reader.held("rollout.prompts_per_step") // size if size else reader.held("trainer.minibatches")
    return count


def read_warmup(reader: Reader) -> None:
    name = f"{OPTIM}.lr_warmup_steps"
    steps = reader.take(name, int, -1)
    # verl's schedule moves once a rollout step, octavo's once an optimizer step
    reader.put("trainer.lr_warmup_steps", max(steps, 0) * num_minibatches(reader), name)


def read_betas(reader: Reader) -> None:
    name = f"{OPTIM}.betas"
    betas = reader.take(name, list, [0.9, 0.999])
    if len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas):
        reader.refuse(name, "it must be two numbers")
        return
    reader.put("trainer.optimizer.beta1", float(betas[0]), name)
    reader.put("trainer.optimizer.beta2", float(betas[1]), name)


def read_precision(reader: Reader) -> None:
    quantization = f"{ROLLOUT}.quantization"
    kv = [f"{ROLLOUT}.engine_kwargs.{e}.kv_cache_dtype" for e in ("vllm", "sglang")]
    fp8, fp8_recipe = f"{TRANSFORMER}.fp8", f"{TRANSFORMER}.fp8_recipe"
    optimizer = f"{OPTIM}.override_optimizer_config.fp8_recipe"
    names = (quantization, *kv, fp8, fp8_recipe, optimizer)
    sampler = {None: "bf16", "fp8": "blockwise", "mxfp8": "mxfp8"}[
        reader.take(quantization, str, None, ("fp8", "mxfp8"))
    ]
    fp8_format = reader.take(fp8, str, None, ("hybrid", "e4m3"))
    trainer = reader.take(fp8_recipe, str, "delayed", FORMAT_RECIPES) if fp8_format else "bf16"
    if not fp8_format and reader.is_given(fp8_recipe):
        reader.refuse(fp8_recipe, f"it has no effect without {fp8}; give that too")
    if reader.take(optimizer, str, trainer) != trainer:
        reader.refuse(optimizer, f"it must be {fp8_recipe}, which is {trainer}")
    cache = "bf16"
    for name in kv:
        cache = KV_DTYPES[reader.take(name, str, "auto", tuple(KV_DTYPES))] if reader.is_given(name) else cache
    if not reader.is_active(*names) or (reader.base.precision and not reader.is_given(*names)):
        return
    if reader.has_base:  # what no key names is the config's
        trainer = trainer if reader.is_given(fp8) else reader.base.trainer.recipe
        held = reader.base.rollout.recipe or reader.base.trainer.recipe
        sampler = sampler if reader.is_given(quantization) else held
        cache = cache if reader.is_given(*kv) else reader.base.rollout.kv_cache_dtype
    is_stale = reader.held("asynchronous.max_policy_lag") > 0  # then no bits are promised
    is_exact = trainer == sampler and get_recipe(trainer).is_row_local and not is_stale
    level = _level(reader, trainer, sampler, cache) if reader.is_given(quantization) else ""
    if level:  # whose trainer.recipe names the sampler's, while training stays in bf16
        trainer = sampler
        reader.put("precision", level, quantization, *kv)
    reader.put("trainer.recipe", trainer, fp8, fp8_recipe)
    if fp8_format:
        reader.put("trainer.fp8_format", fp8_format, fp8)
    reader.put("rollout.recipe", "" if is_exact else sampler, quantization, *((fp8,) if reader.is_given(fp8) else ()))
    reader.put("rollout.kv_cache_dtype", cache, *kv)
    reader.put("exact", is_exact, quantization, fp8, *((STALENESS,) if is_stale else ()))


def _level(reader: Reader, trainer: str, sampler: str, cache: str) -> str:
    """The precision level that means the same: FP8 rollouts for a bf16 trainer, where nothing else is set."""
    own = reader.base.trainer.model_fields_set & {"recipe", "fp8_format", "backward"}
    is_plain = not own and not reader.base.rollout.model_fields_set & {"recipe", "kv_cache_dtype", "attention_dtype"}
    if reader.has_base or not is_plain or (trainer, sampler) != ("bf16", "blockwise"):
        return ""
    return "linears+kv" if cache == "fp8" else "linears"


def read_files(reader: Reader) -> None:
    model = reader.take(f"{MODEL}.path", str, None)
    if model is not None:
        reader.put("model.path", str(Path(model).expanduser()), f"{MODEL}.path")
    train, heldout = (_files(reader, name) for name in ("data.train_files", "data.val_files"))
    if train is not None:
        reader.put("task.name", "questions", "data.train_files")
        reader.put("task.path", train, "data.train_files")
    if reader.is_given(f"{MODEL}.path", "data.train_files"):  # a checkpoint needs no warm start
        reader.put("warmup.steps", 0, f"{MODEL}.path", "data.train_files")
    limit, key = "data.max_prompt_length", "data.prompt_key"
    longest, question_key = reader.take(limit, int, None), reader.take(key, str, None)
    samples = reader.take("data.val_max_samples", int, -1)
    if samples > 0:
        reader.put("eval.num_prompts", samples, "data.val_max_samples")
    is_filtered = reader.take(_FILTER, bool, False)
    has_files = reader.held("task.name") == "questions" or "data.train_files" in reader.refused
    _verifier(reader, has_files)
    _epochs(reader, has_files)
    if not has_files:
        values = {"data.val_files": heldout, key: question_key, limit: longest, _FILTER: is_filtered or None}
        for each in (each for each, value in values.items() if value is not None):
            reader.refuse(each, _NEEDS_FILES)
        return
    if heldout is not None:
        reader.put("task.heldout_path", heldout, "data.val_files")
    if question_key is not None:
        reader.put("task.question_key", question_key, key)
    reader.put("task.max_prompt_tokens", 512 if longest is None else longest, limit)
    reader.put("task.drop_long_prompts", is_filtered, _FILTER)


def _epochs(reader: Reader, has_files: bool) -> None:
    name, steps = "trainer.total_epochs", "trainer.total_training_steps"
    epochs = reader.take(name, int, 30)
    if has_files:
        reader.put("trainer.epochs", epochs, name)
        if reader.is_given(name) and not reader.is_given(steps) and is_set(reader.base, "trainer.steps"):
            reader.notes.append(f"trainer.steps = {reader.base.trainer.steps} ends the epochs where it comes first")
    elif epochs != 30 and not reader.is_given(steps):
        reader.refuse(name, f"a task that makes its own problems has no epochs; give {steps}, or data.train_files")


def _verifier(reader: Reader, has_files: bool) -> None:
    for prefix in VERIFIERS:
        path, name = f"{prefix}.path", f"{prefix}.name"
        module, function = reader.take(path, str, None), reader.take(name, str, None)
        if module is None:
            continue  # verl does not read the name either
        if has_files:
            reader.put("task.verifier", f"{Path(module).expanduser()}:{function or 'compute_score'}", path, name)
            _verifier_options(reader, f"{prefix}.reward_kwargs")
        else:
            reader.refuse(path, _NEEDS_FILES)
    is_judged = "task.verifier" in reader.settings or is_set(reader.base, "task.verifier")
    if reader.is_given("data.train_files") and not is_judged:
        verifier = reader.held("task.verifier")
        reader.notes.append(
            f"no custom_reward_function -> task.verifier = {verifier}, for all answers; verl chooses by data_source"
        )


def _verifier_options(reader: Reader, section: str) -> None:
    names = [name for name in reader.left_over() if name.rpartition(".")[0] == section]
    options = {name.rpartition(".")[2]: reader.document[name].value for name in names}
    for name in names:
        reader.skip(name)
    if options:
        reader.put("task.verifier_options", options, *names)


def _files(reader: Reader, name: str) -> str | tuple[str, ...] | None:
    files = reader.take(name, list, None)
    if files is None:
        return None
    if not files or not all(isinstance(file, str) for file in files):
        reader.refuse(name, "it must be a file, or a list of files")
        return None
    paths = tuple(str(Path(file).expanduser()) for file in files)
    return paths[0] if len(paths) == 1 else paths


def read_run(reader: Reader) -> None:
    project, experiment, folder = (
        f"trainer.{name}" for name in ("project_name", "experiment_name", "default_local_dir")
    )
    words = [reader.take(project, str, "verl_examples"), reader.take(experiment, str, "gsm8k")]
    path = reader.take(folder, str, None)
    if path is not None:
        reader.put("run.dir", str(Path(path).expanduser()), folder)
    elif reader.is_given(project, experiment):
        reader.put("run.dir", "/".join(("checkpoints", *words)), project, experiment)
    loggers = reader.take("trainer.logger", list, None)
    if loggers is not None:
        if foreign := [each for each in loggers if each not in ("console", "tensorboard", "wandb", "mlflow")]:
            why = f"octavo writes console, tensorboard, wandb and mlflow, not {', '.join(map(str, foreign))}"
            reader.refuse("trainer.logger", why)
        else:
            reader.put("run.tensorboard", "tensorboard" in loggers, "trainer.logger")
            for name in ("wandb", "mlflow"):
                reader.put(f"run.{name}", words[0] if name in loggers else "", "trainer.logger")
    for name, key in (("trainer.save_freq", "run.checkpoint_every"), ("trainer.max_actor_ckpt_to_keep", "run.keep")):
        number = reader.take(name, int, None)
        if number is not None:
            reader.put(key, max(number, 0), name)
    every = reader.take("trainer.test_freq", int, None)
    if every is not None:
        reader.put("eval.every", max(every, 0), "trainer.test_freq")
