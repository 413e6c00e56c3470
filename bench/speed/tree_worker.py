"""Times cases of one octavo tree on request: `bench.speed.trees` runs this file once for each tree.

It imports octavo's public names alone, which every tree has, and nothing of `bench`. A request is one line of JSON on
stdin, the answer one line on stdout: {"build": case} makes a case and warms it up, {"time": case} times it once and
answers seconds a unit of work, {"free": case} drops it; {"serve": port} starts a server and answers no more. What fails
is answered with the error's text.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import octavo
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, Scaling, get_recipe
from octavo.ops.attention import PAGE_SIZE
from octavo.ops.quantize import quantize, quantize_both
from octavo.serve.engine import Engine

Call = Callable[[], object]
STEP_LINEARS = 6  # of a step of linears: their forwards, then one backward for all
_LLAMA_3_8B = {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_gqa_groups": 8}
_TOY_LAYER = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 2, "num_gqa_groups": 1}
_QWEN3 = {"family": "qwen3", "qk_norm": True, "rope_theta": 1e6, "max_position_embeddings": 40_960}
_QWEN3_8B = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_layers": 36}
_QWEN3_8B_HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_TOY_DECODER = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_layers": 2}
_TOY_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def main() -> None:
    """Answer requests until stdin ends; what libraries print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    device = sys.argv[1]
    built: dict[str, tuple[Call, int]] = {}
    for line in sys.stdin:
        ((verb, name),) = json.loads(line).items()
        try:
            answer: dict[str, object] = {"seconds": _VERBS[verb](built, name, device)}
        except Exception as error:  # the other cases' figures are worth having
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _build(built: dict[str, tuple[Call, int]], name: str, device: str) -> None:
    built[name] = build(name, device)
    _time(*built[name], device)


def _free(built: dict[str, tuple[Call, int]], name: str, device: str) -> None:
    built.pop(name, None)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _serve(built: dict[str, tuple[Call, int]], port: str, device: str) -> None:
    from octavo.serve.http import ServerConfig, run_server

    is_gpu = device == "cuda"
    limits = {"max_num_seqs": 512, "num_kv_pages": 4096} if is_gpu else {"max_num_seqs": 8, "num_kv_pages": 32}

    def build_engine() -> Engine:
        llm = octavo.LLM(_build_decoder("blockwise", device), enable_prefix_caching=False, seed=0, **limits)  # type: ignore[arg-type]
        llm.engine.warm_up()
        return llm.engine

    run_server(build_engine, ServerConfig(model_names=("decoder",)), port=int(port))


_VERBS: dict[str, Callable[[dict[str, tuple[Call, int]], str, str], float | None]] = {
    "build": _build,
    "free": _free,
    "serve": _serve,
    "time": lambda built, name, device: _time(*built[name], device),
}


def build(name: str, device: str) -> tuple[Call, int]:
    """(a call, units of work in it) of a case: its kind, what it is about, its recipe or scaling.

    Raises:
        ValueError: an unknown kind.
    """
    kind, sizes, variant = name.split(" ")
    numbers = [int(size) for size in sizes.split("x")]
    if kind == "quantize":
        return _build_quantizer(numbers, variant, device), 1
    if kind in ("linear", "host"):
        num_calls = 20 if kind == "host" else 1
        return _repeat(_build_linears(numbers, variant, device, 1 if kind == "host" else STEP_LINEARS), num_calls), (
            num_calls if kind == "host" else STEP_LINEARS
        )
    if kind == "step":
        return _build_step(numbers, variant, device), 1
    if kind == "decode":
        return _build_decode(numbers, variant, device)
    raise ValueError(f"no case of kind {kind!r}")


def _time(call: Call, num_units: int, device: str) -> float:
    """Seconds of a unit: one call to get going, then at least three and half a second of them."""
    call()
    _synchronize(device)
    began, num_calls = time.perf_counter(), 0
    while num_calls < 3 or time.perf_counter() - began < 0.25:
        call()
        num_calls += 1
        if num_calls % 3 == 0:
            _synchronize(device)  # so that the clock is not read far ahead of the device
        if num_units >= 1000:  # a batch of an engine, which is long by itself
            break
    _synchronize(device)
    return (time.perf_counter() - began) / num_calls / num_units


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _repeat(call: Call, num_calls: int) -> Call:
    def repeated() -> None:
        for _ in range(num_calls):
            call()

    return repeated


def _build_quantizer(sizes: list[int], variant: str, device: str) -> Call:
    x = torch.randn(sizes, device=device).bfloat16()
    scalings = {"tensor": Scaling.per_tensor(), "row": Scaling.per_row(), "1x128": Scaling.block_1x128()}
    name, _, both = variant.partition("-")
    scaling = scalings[name]
    if both:
        return lambda: quantize_both(x, scaling, column_scaling=scaling)
    return lambda: quantize(x, scaling)


def _build_linears(sizes: list[int], recipe: str, device: str, num_linears: int) -> Call:
    tokens, cols, rows = sizes
    modules = [
        octavo.nn.Linear(cols, rows, bias=False, device=device, dtype=torch.bfloat16) for _ in range(num_linears)
    ]
    for module in modules:
        module.set_recipe(get_recipe(recipe))
    leaves = [torch.randn(tokens, cols, device=device).bfloat16().requires_grad_() for _ in modules]
    grad = torch.randn(tokens, rows, device=device).bfloat16()

    def call() -> None:
        for module, leaf in zip(modules, leaves, strict=True):
            module.zero_grad()
            leaf.grad = None
            module.weight_version += 1
        outs = [module(leaf) for module, leaf in zip(modules, leaves, strict=True)]
        torch.autograd.backward(outs, [grad] * len(outs))

    return call


def _build_step(sizes: list[int], recipe: str, device: str) -> Call:
    """A training step of layers x batch x tokens: forward, mean of squares, backward, torch's fused AdamW."""
    num_layers, batch, seq_len = sizes
    width = _LLAMA_3_8B if device == "cuda" else _TOY_LAYER
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(
            octavo.nn.TransformerLayer(
                *width.values(),
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                eps=1e-5,
                dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(num_layers)
        )
    )
    octavo.convert(layers, recipe)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-5, fused=device == "cuda")
    x = torch.randn(batch, seq_len, width["hidden_size"], device=device).bfloat16()

    backends = [SDPBackend.CUDNN_ATTENTION if device == "cuda" else SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]

    def call() -> None:
        with sdpa_kernel(backends):
            layers(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return call


def _build_decode(sizes: list[int], recipe: str, device: str) -> tuple[Call, int]:
    """Requests x prompt tokens x output tokens through an engine with an FP8 KV cache."""
    num_requests, prompt_len, output_len = sizes
    model = _build_decoder(recipe, device)
    num_pages = num_requests * (2 + (prompt_len + output_len) // PAGE_SIZE)
    llm = octavo.LLM(model, max_num_seqs=max(num_requests, 8), num_kv_pages=num_pages, seed=0)
    vocab_size = model.config.vocab_size
    prompts = [[(31 * i + 7 * j) % vocab_size for j in range(prompt_len)] for i in range(num_requests)]
    params = octavo.SamplingParams(temperature=1.0, max_tokens=output_len, ignore_eos=True)
    return lambda: llm.generate(prompts, params), num_requests * output_len


def _build_decoder(recipe: str, device: str) -> Decoder:
    """Qwen3-8B with random weights and an FP8 KV cache; a toy on a CPU."""
    shape = {**_QWEN3_8B, **_QWEN3_8B_HEADS} if device == "cuda" else {**_TOY_DECODER, **_TOY_HEADS}
    model = Decoder(ModelConfig(**_QWEN3, **shape), dtype=torch.bfloat16, device="meta")  # type: ignore[arg-type]
    torch.manual_seed(0)
    for name, parameter in list(model.named_parameters()):  # drawn on the device, which takes seconds
        value = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
        module, _, leaf = name.rpartition(".")
        value = value if value.dim() == 1 else value.normal_(0.0, 0.02)
        setattr(model.get_submodule(module), leaf, nn.Parameter(value, requires_grad=False))
    model.to(device)
    model.set_numerics(Numerics(get_recipe(recipe), "fp8"))
    return model


if __name__ == "__main__":
    main()
