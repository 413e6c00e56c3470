"""`octavo serve MODEL`: an OpenAI-compatible server for one checkpoint."""

import importlib.util
import logging
from pathlib import Path
from typing import Annotated

import typer

from octavo.env import admin_key_from_env, api_key_from_env
from octavo.errors import BackendError
from octavo.serve import LLM
from octavo.serve.engine import Engine
from octavo.serve.llm import check_checkpoint

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def command(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; several are fine. Also OCTAVO_API_KEY.")
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(help="Key of the /admin routes, absent without it. Also OCTAVO_ADMIN_KEY.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that clients ask for; several are fine. The directory's by default.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; the checkpoint's by default.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="fp8 (blockwise) or a recipe's name; the checkpoint's own by default.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="bf16 (auto is that), or fp8: half the memory.")] = "auto",
    attention_dtype: Annotated[
        str, typer.Option(help="What attention multiplies in: bf16, or fp8, which needs an FP8 cache.")
    ] = "auto",
    exact: Annotated[bool, typer.Option("--exact", help="Bits that depend on neither batch nor chunking.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one by default.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at a time.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step.")] = 8192,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a sequence, prompt and output.")] = None,
    num_kv_pages: Annotated[int | None, typer.Option(help="Pages of 64 tokens; what fits by default.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to take.")] = 0.9,
    prefix_caching: Annotated[bool, typer.Option(help="Share pages between prompts that begin alike.")] = True,
    seed: Annotated[int, typer.Option(help="Of requests that bring none.")] = 0,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; more are refused with 429.")] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request.")] = 8 << 20,
    max_n: Annotated[int, typer.Option(help="Samples of a prompt.")] = 128,
    weights_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of checkpoints that /admin/update_weights may take over; none by default."),
    ] = None,
    max_bucket_bytes: Annotated[int, typer.Option(help="Of a request that uploads weights.")] = 256 << 20,
    update_timeout: Annotated[
        float, typer.Option(help="Seconds after which a stale weight upload is dropped.")
    ] = 600.0,
    step_timeout: Annotated[float, typer.Option(help="Age of a step, in s, that makes /health say 503.")] = 120.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests have to finish after SIGTERM.")] = 300.0,
) -> None:
    """Serve a checkpoint over OpenAI's API: completions, chat completions, and a page to try them at /.

    SIGTERM or Ctrl-C finishes what was admitted and refuses what is new; a second one ends it.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise BackendError(f"octavo serve needs {', '.join(missing)}; pip install 'octavo[serve]'")
    from octavo.serve.http import ServerConfig, run_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    key_from_env = api_key_from_env()
    config = ServerConfig(
        model_names=tuple(served_model_name or [model.resolve().name]),
        api_keys=tuple(api_key or ([key_from_env] if key_from_env else [])),
        admin_key=admin_key or admin_key_from_env(),
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        max_n=max_n,
        step_timeout_s=step_timeout,
        drain_timeout_s=drain_timeout,
        weights_dir=weights_dir,
        max_bucket_bytes=max_bucket_bytes,
        update_timeout_s=update_timeout,
    )

    check_checkpoint(
        model, quantization, kv_cache_dtype, attention_dtype
    )  # before anybody is told that something listens

    def build_engine() -> Engine:
        llm = LLM(
            model,
            tokenizer,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            attention_dtype=attention_dtype,
            exact=exact,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_kv_pages=num_kv_pages,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=prefix_caching,
            seed=seed,
            device=device,
        )
        logging.getLogger(__name__).info("ready: %d KV pages", llm.stats.num_kv_pages)
        return llm.engine

    raise typer.Exit(run_server(build_engine, config, host, port))
