"""`octavo serve MODEL`: an OpenAI-compatible server for one checkpoint."""

import dataclasses
import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import typer

from octavo.cli import serve_options as options
from octavo.cli.checkpoint_folder import Checkpoint
from octavo.cli.ranks import on_first_rank
from octavo.env import admin_key_from_env, api_key_from_env
from octavo.errors import BackendError, ConfigError, install_extra
from octavo.models import ModelConfig
from octavo.models.chat import describe_template
from octavo.models.checkpoint import record
from octavo.models.checkpoint.dialects import read_config
from octavo.serve import LLM
from octavo.serve.compile_ahead import fork_ahead
from octavo.serve.engine import Engine, EngineConfig, served_tokens
from octavo.serve.model_choice import as_dtype, check_checkpoint, eos_ids_of_generation
from octavo.serve.tensor_workers import EngineOrder, TensorParallel, chosen_device

_OF_A_RUN = re.compile(r"([^/]+)/checkpoints/step-0*(\d+)/model")  # a checkpoint of octavo train or octavo rl
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")

logger = logging.getLogger(__name__)


def command(
    model: Checkpoint,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    api_key: options.ApiKeys = None,
    admin_key: options.AdminKey = None,
    served_model_name: options.ServedModelName = None,
    tokenizer: options.TokenizerFile = None,
    chat_template: options.ChatTemplate = None,
    dtype: options.DType = "auto",
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KVCacheDtype = "auto",
    attention_dtype: options.AttentionDtype = "auto",
    kv_scales: options.KVScales = "per_token_head",
    kv_scale_margin: options.KVScaleMargin = 1.05,
    exact: options.Exact = False,
    device: options.Device = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    tensor_parallel_mode: options.TensorParallelMode = None,
    data_parallel_size: options.DataParallelSize = 1,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    num_kv_pages: options.NumKVPages = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    enable_prefix_caching: options.EnablePrefixCaching = True,
    seed: options.Seed = 0,
    enable_return_routed_experts: options.ReturnRoutedExperts = False,
    enforce_eager: options.EnforceEager = False,
    warm_up: options.WarmUp = True,
    max_num_waiting: options.MaxNumWaiting = 1024,
    max_body_bytes: options.MaxBodyBytes = 8 << 20,
    max_n: options.MaxN = 128,
    weights_dir: options.WeightsDir = None,
    max_bucket_bytes: options.MaxBucketBytes = 256 << 20,
    update_timeout: options.UpdateTimeout = 600.0,
    step_timeout: options.StepTimeout = 120.0,
    drain_timeout: options.DrainTimeout = 300.0,
    access_log: options.AccessLog = False,
) -> None:
    """Serve a checkpoint over OpenAI's API: completions, chat completions, and a page to try them at /.

    SIGTERM or Ctrl-C finishes what was admitted and refuses what is new; a second one ends it.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise BackendError(f"octavo serve needs {', '.join(missing)}; {install_extra('serve')}")
    from octavo.serve.http import ServerConfig, run_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    key_from_env = api_key_from_env()
    config = ServerConfig(
        model_names=tuple(served_model_name or default_names(model)),
        api_keys=tuple(api_key or ([key_from_env] if key_from_env else [])),
        admin_key=admin_key or admin_key_from_env(),
        max_num_waiting=max_num_waiting,
        max_body_bytes=max_body_bytes,
        max_n=max_n,
        step_timeout_s=step_timeout,
        drain_timeout_s=drain_timeout,
        weights_dir=weights_dir,
        max_bucket_bytes=max_bucket_bytes,
        update_timeout_s=update_timeout,
        access_log=access_log,
    )
    limits = EngineConfig(
        **served_tokens(max_num_seqs, max_num_batched_tokens),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_kv_pages=num_kv_pages,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_prefix_caching=enable_prefix_caching,
        seed=seed,
        enforce_eager=enforce_eager,
        enable_return_routed_experts=enable_return_routed_experts,
        warm_up=warm_up,
    )
    numerics = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype, "attention_dtype": attention_dtype}
    how = numerics | {"exact": exact, "device": device, "kv_scales": kv_scales}
    asked = Asked(model, tokenizer, how, limits, kv_scale_margin, chat_template, dtype)
    asked = dataclasses.replace(asked, tensor_parallel=(tensor_parallel_size, tensor_parallel_mode))
    asked.check()  # before anybody is told that something listens, and before minutes of loading
    with on_first_rank(tensor_parallel_size * data_parallel_size):
        if data_parallel_size > 1:
            from octavo.serve.router import run_router, split_devices

            devices = split_devices(data_parallel_size, tensor_parallel_size, chosen_device(device))
            raise typer.Exit(run_router(asked.build, config, host, port, devices=devices))
        if tensor_parallel_size == 1:
            fork_ahead(chosen_device(device))
        raise typer.Exit(run_server(asked.build, config, host, port))


def default_names(model: Path) -> list[str]:
    """The directory's name; RUN-step-N and RUN for RUN/checkpoints/step-N/model, where its own is of any run."""
    path = model.resolve()
    found = _OF_A_RUN.fullmatch("/".join(path.parts[-4:]))
    return [f"{found[1]}-step-{found[2]}", found[1]] if found else [path.name]


@dataclasses.dataclass(frozen=True)
class Asked:
    """The engine that was asked for.

    Args:
        how: LLM's quantization, kv_cache_dtype, attention_dtype, exact, device and kv_scales.
        kv_scale_margin: of the server's own scales, see KVScaleTable.
        chat_template: a file; None for the checkpoint's own template.
        dtype: LLM's.
        tensor_parallel: size and mode, LLM's.
    """

    model: Path
    tokenizer: Path | None
    how: dict[str, Any]
    limits: EngineConfig
    kv_scale_margin: float = 1.0
    chat_template: Path | None = None
    dtype: str = "auto"
    tensor_parallel: tuple[int, Any] = (1, None)

    def check(self) -> None:
        """Refuse by config.json alone what would else be refused once the weights are read.

        Raises:
            ConfigError: an option that does not fit the checkpoint, or a file that is not there; see also
                check_checkpoint.
            RecipeError: see check_checkpoint.
            CheckpointError: see check_checkpoint.
            BackendError: see check_checkpoint.
            ShapeError: tensor-parallel ranks that do not divide the model.
        """
        as_dtype(self.dtype)
        size, mode = self.tensor_parallel
        TensorParallel(size, mode).check(chosen_device(self.how["device"]))
        check_checkpoint(self.model, limits=self.limits, **self.how)
        eos_ids_of_generation(self.model)
        if size > 1:
            asked = self.how | {"dtype": as_dtype(self.dtype)}
            EngineOrder(self.model, None, asked, self.limits, (), TensorParallel(size, mode)).check()
        if self.limits.enable_return_routed_experts and not ModelConfig.from_hf(read_config(self.model)).num_experts:
            raise ConfigError("--enable-return-routed-experts: this model has no experts; leave it out")
        if self.tokenizer is not None and not self.tokenizer.exists():
            raise ConfigError(f"--tokenizer: there is no {self.tokenizer}")
        if self.chat_template is not None:
            try:
                self.chat_template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                text = f"got {str(self.chat_template)!r:.80}: {error}"
                raise ConfigError(f"--chat-template must be a file with a Jinja template, {text}") from None
        if self.tokenizer is None and not (self.model / "tokenizer.json").is_file():
            if self.chat_template is not None:
                raise ConfigError(f"--chat-template needs a tokenizer, and {self.model} has none; give --tokenizer")
            text = "%s has no tokenizer.json: token ids only, which return_token_ids asks for; --tokenizer names one"
            logger.warning(text, self.model)

    def build(self) -> Engine:
        """Load the checkpoint."""
        limits = dataclasses.asdict(self.limits)
        size, mode = self.tensor_parallel
        of_ranks = {"tensor_parallel_size": size, "tensor_parallel_mode": mode}
        engine = LLM(self.model, self.tokenizer, **self.how, **limits, **of_ranks, dtype=self.dtype).engine
        if engine.model.kv_table is not None:
            engine.model.kv_table.margin = self.kv_scale_margin
        if engine.tokenizer is not None:
            if self.chat_template is not None:
                engine.tokenizer.chat_template = self.chat_template.read_text(encoding="utf-8")
            logger.info("chat: %s", describe_template(engine.tokenizer))
        numerics, pages = engine.model.numerics, engine.stats.num_kv_pages
        mode = ", exact" if numerics.exact else ""
        text = "linears %s, attention %s, %d KV pages in %s%s"
        logger.info(text, numerics.recipe.name, numerics.attention_dtype, pages, numerics.kv_cache_dtype, mode)
        trained = record.read(self.model)
        is_declared = self.how["quantization"] is not None or numerics.recipe.input is not None  # or FP8 already
        if trained is not None and not is_declared and trained.recipe != numerics.recipe.name:
            logger.info("trained under %s; --quantization %s serves it so", trained.recipe, trained.recipe)
        return engine
