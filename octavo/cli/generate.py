"""`octavo generate MODEL --prompt TEXT`: text from a checkpoint, and one line on what it took."""

from typing import Annotated

import typer

from octavo.cli.checkpoint_folder import Checkpoint
from octavo.cli.console import plain_console
from octavo.cli.serve_options import TensorParallelMode, TensorParallelSize
from octavo.errors import RequestError
from octavo.serve import LLM, RequestOutput, SamplingParams
from octavo.serve.engine import EngineStats


def command(
    model: Checkpoint,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; may be given several times.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep this probability mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the best k tokens; -1 is off.")] = -1,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")] = 0.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message, put into the tokenizer's chat template.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be given several times.")
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples a prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="fp8 (rowwise, or what an FP8 checkpoint is) or a recipe's name; the checkpoint's own by default."
        ),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="bf16, or fp8: half the memory.")] = "bf16",
    attention_dtype: Annotated[
        str, typer.Option(help="What attention multiplies in: bf16, or fp8, which needs an FP8 cache.")
    ] = "bf16",
    exact: Annotated[bool, typer.Option("--exact", help="Bits that depend on neither batch nor chunking.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one by default.")] = None,
    tensor_parallel_size: TensorParallelSize = 1,
    tensor_parallel_mode: TensorParallelMode = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Generate text from a checkpoint."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        stop=stop,
        n=n,
    )
    with LLM(
        model,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        attention_dtype=attention_dtype,
        exact=exact,
        seed=seed,
        device=device,
        max_num_seqs=min(256, len(prompt) * n),
        tensor_parallel_size=tensor_parallel_size,
        tensor_parallel_mode=tensor_parallel_mode,  # type: ignore[arg-type]
        warm_up=False,  # for one batch
    ) as llm:
        if llm.tokenizer is None:
            raise RequestError(f"{model} holds no tokenizer.json, so a text prompt cannot be read; put one beside it")
        if chat:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in prompt], params, use_progress=progress)
        else:
            outputs = llm.generate(prompt, params, use_progress=progress)
        stats, max_model_len = llm.stats, llm.engine.max_model_len
    for text, output in zip(prompt, outputs, strict=True):
        for sample in output.outputs:
            # not rich, which expands tabs, drops carriage returns and takes ":x:" for an emoji
            typer.secho(text, bold=True, nl=chat)
            typer.echo(sample.text, color=True)
    plain_console().print(_summary(stats), style="dim", soft_wrap=True)
    if note := _cut_short(outputs, max_tokens, max_model_len):
        plain_console(stderr=True).print(note, style="yellow", soft_wrap=True)


def _cut_short(outputs: list[RequestOutput], max_tokens: int, max_model_len: int) -> str:
    """Says so where the context ended an output before --max-tokens did; else empty."""
    cut = [s for o in outputs for s in o.outputs if s.finish_reason == "length" and len(s.token_ids) < max_tokens]
    if not cut:
        return ""
    least = min(len(sample.token_ids) for sample in cut)
    return (
        f"note: {len(cut)} of {sum(len(o.outputs) for o in outputs)} samples end where the context does, after {least} "
        f"tokens or more, not at --max-tokens {max_tokens}: prompt and output have {max_model_len} tokens together"
    )


def _summary(stats: EngineStats) -> str:
    return (
        f"{stats.output_tokens} tokens in {stats.seconds:.2f} s ({stats.output_tokens_per_s:.0f} tokens/s), "
        f"{stats.num_steps} steps, {stats.num_prefix_hit_tokens} prompt tokens from the prefix cache, "
        f"{stats.num_preemptions} preemptions, at most {stats.num_kv_pages_peak} of {stats.num_kv_pages} KV pages"
    )
