"""Writes the tables of docs/size.md: `make size`, or `python docs/tools/size.py`.

Counts the Python files of octavo/: lines as `wc -l` has them, and code, which is what is left without blank lines,
comments and docstrings.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "size.md"
_MARKED = re.compile(r"(<!-- size (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# (job, its files in octavo/, the peer with its lines and code as this script counts them); docs/size.md has the commits
JOBS = (
    (
        "FP8 linears: formats, recipes, quantizers, GEMMs, modules",
        "numerics nn/linear.py nn/weight_holder.py nn/functional/linear.py nn/functional/emulated.py "
        "nn/functional/saved_operands.py nn/weights nn/delayed.py nn/amax_watch.py nn/conversion.py "
        "nn/plain_linears.py nn/autocast_*.py nn/live_weights.py nn/check_weights.py nn/finite_weights.py "
        "nn/other_products.py nn/overrides.py nn/speed_table.py ops/quantize ops/gemm/scaled_mm",
        "torchao float8, with FSDP2 and TP: 3,323 (2,015)",
    ),
    ("All kernels with their references", "ops", "Liger-Kernel ops: 13,953 (9,952)"),
    (
        "Inference engine and `LLM`",
        "serve/engine serve/llm.py serve/outputs.py serve/sampling_params.py serve/keywords.py serve/model_choice.py "
        "serve/prompts.py",
        "mini-sglang scheduler, engine, KV cache, messages, LLM: 2,245 (1,687); all of nano-vllm: 1,385 (1,195)",
    ),
    (
        "HTTP server",
        "serve/http serve/engine_client.py serve/nursery.py serve/worker_process.py",
        "mini-sglang server and tokenizer: 1,087 (848)",
    ),
    ("Training loop", "train run optim", "torchtitan components, config, trainer: 9,672 (6,393)"),
    ("RL loop, tasks and engines", "rl", "verl trainer/ppo: 10,847 (6,740), beside its workers: 23,949 (14,857)"),
)

# What octavo has beyond the smaller peer of a job -> its files: what the lines buy.
FEATURES = {
    "FP8 linears": {
        "delayed scaling as TransformerEngine has it": "numerics/delayed.py nn/delayed.py nn/weights/delayed.py "
        "nn/amax_watch.py ops/quantize/delayed",
        "emulated `mxfp8` and `nvfp4`": "numerics/emulated*.py numerics/hadamard.py numerics/stochastic.py "
        "nn/functional/emulated.py ops/quantize/fake_quantize",
        "blockwise codes both ways from one read, by own kernels": "ops/quantize/triton",
        "`octavo.autocast` over plain linears": "nn/autocast_*.py nn/plain_linears.py nn/weights/plain.py",
        "`convert`'s report, `num_tokens=`, overrides by name": "nn/conversion.py nn/other_products.py "
        "nn/speed_table.py nn/overrides.py",
        "codes alone for inference, codes at fixed addresses, writes that were forgotten": "nn/weights/codes.py "
        "nn/weights/pinned.py nn/weights/write_watch.py nn/weights/capture.py nn/live_weights.py nn/check_weights.py "
        "nn/finite_weights.py",
        "experts as rows of one weight": "nn/weights/experts.py",
        "`octavo analyze`: where weights fall in a format's range": "numerics/analysis*.py",
        "exact mode's products": "numerics/fixed_point.py ops/gemm/scaled_mm/exact.py",
    },
    "Inference engine": {
        "vLLM's keywords, requests' outputs, `LLM.chat`": "serve/keywords.py serve/outputs.py serve/llm.py "
        "serve/model_choice.py serve/prompts.py",
        "prompts in CUDA graphs, prompts over packed keys, warm-up": "serve/engine/prompt_graphs.py "
        "serve/engine/mixed_graphs.py serve/engine/mixed_inputs.py "
        "serve/engine/varlen_prefill.py serve/engine/prompt_warm_up.py serve/engine/graph_capture.py "
        "serve/compile_ahead.py serve/stand_in.py serve/kernel_processes.py serve/kernel_list.py",
        "JSON schemas, tried in worker processes": "serve/engine/grammar.py serve/engine/schema_worker.py",
        "penalties, `logit_bias`, `min_tokens` on the device": "serve/engine/logit_adjustment.py",
        "engine thread with live weight updates and sleep": "serve/engine/loop.py",
        "prompt logprobs, which experts a token took": "serve/engine/prompt_logprobs.py serve/engine/expert_choices.py",
        "plans for known lengths, limits of requests": "serve/engine/admission.py serve/engine/waiting.py "
        "serve/engine/request_limits.py",
    },
    "HTTP server": {
        "weights over HTTP, sleep and wake": "serve/http/weights.py serve/http/weight_transactions.py "
        "serve/http/admin.py",
        "schemas compiled beside the event loop": "serve/http/schema*.py serve/http/worker.py serve/http/lanes.py "
        "serve/nursery.py serve/worker_process.py",
        "logprobs in the forms of both APIs, texts of part tokens": "serve/http/token_text.py serve/http/tokens.py "
        "serve/http/texts.py",
        "limits against hostile clients, keys, access log": "serve/http/connections.py serve/http/body.py "
        "serve/http/access_log.py serve/http/errors.py",
        "Prometheus metrics, health": "serve/http/metrics.py serve/http/status.py",
    },
    "Several GPUs": {
        "ranks as a mesh, FSDP2 and HSDP, ordered sums, late ranks named": "distributed/mesh.py "
        "distributed/agreement.py distributed/outcome.py distributed/watchdog.py distributed/links.py "
        "distributed/reduction.py distributed/amax.py distributed/collectives.py parallel/fsdp.py parallel/gather.py "
        "parallel/lend.py cli/ranks.py doctor/ranks.py run/folder_lock.py run/first_bad_tensor.py train/rank_memory.py "
        "rl/ranks.py rl/engines/dealt.py",
        "FP8 codes in the all-gather": "parallel/fp8_all_gather.py parallel/sharded_weight.py nn/weights/gathered.py "
        "nn/weights/shared_scales.py ops/quantize/transpose",
        "gradients in FP8": "distributed/fp8_hook.py distributed/packed.py distributed/reduced_in_fp8.py "
        "distributed/reduction_q.py distributed/transport.py distributed/two_shot.py parallel/fp8_reduce_scatter.py "
        "ops/packed",
        "updates with the same bits on any layout": "distributed/norm.py distributed/shards.py optim/state.py "
        "ops/piece_sums",
        "checkpoints by shards, in the background": "parallel/checkpoint.py parallel/load.py parallel/shard_files.py "
        "parallel/staging.py run/manifest.py models/export.py",
    },
    "No peer has": {
        "Q/DQ graphs from torch.export and ONNX as fused FP8 ops": "qdq",
        "`octavo doctor`: which layer, which operand, which cause": "doctor",
        "weights staged, verified, committed: in process, on disk, over HTTP": "weights",
        "five FP8 checkpoint dialects, both ways": "models/checkpoint",
        "configurations of verl, NeMo-RL, slime and Megatron": "integrations/config",
        "rollouts from octavo serve, vLLM, SGLang; lm-eval": "integrations/rollout integrations/lm_eval.py",
        "FP8 or bf16 by the step": "amp",
        "pages and charts of `octavo demo` and `octavo rl`": "report",
        "tolerances, generators and a kernel interpreter for tests": "testing",
    },
}


class Size(NamedTuple):
    """Lines and code of some files."""

    lines: int
    code: int


def main() -> int:
    """Write the page's tables and print them."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(packages())
    return 0


def fill(text: str) -> str:
    """The page's text with its tables as the tree is."""
    tables = {"packages": packages, "jobs": jobs, "features": features}
    return _MARKED.sub(lambda match: f"{match[1]}\n{tables[match[2]]()}\n\n{match[3]}", text)


def packages() -> str:
    """A row a package of octavo."""
    tree = ROOT / "octavo"
    folders = sorted(path for path in tree.iterdir() if (path / "__init__.py").is_file())
    sizes = {f"`{folder.name}/`": size_of(folder.rglob("*.py")) for folder in folders}
    sizes["files beside them"] = size_of(tree.glob("*.py"))
    sizes["all"] = Size(sum(s.lines for s in sizes.values()), sum(s.code for s in sizes.values()))
    return table(("Package", "Lines", "Code"), [(name, f"{s.lines:,}", f"{s.code:,}") for name, s in sizes.items()])


def jobs() -> str:
    """A row a job, with its peer."""
    rows = [(job, *_sizes(files), peer) for job, files, peer in JOBS]
    return table(("Job", "Lines", "Code", "Peer: lines (code)"), rows)


def features() -> str:
    """A row a feature."""
    rows = [(group, feature, *_sizes(files)) for group, part in FEATURES.items() for feature, files in part.items()]
    return table(("Beyond", "What the lines buy", "Lines", "Code"), rows)


def _sizes(patterns: str) -> tuple[str, str]:
    size = size_of(files_of(patterns))
    return f"{size.lines:,}", f"{size.code:,}"


def files_of(patterns: str) -> set[Path]:
    """Python files of octavo/ that one of the patterns, or a folder among them, holds.

    Raises:
        FileNotFoundError: a pattern that holds none.
    """
    found: set[Path] = set()
    for pattern in patterns.split():
        paths = [path for match in (ROOT / "octavo").glob(pattern) for path in (match.rglob("*.py"), [match])]
        files = {path for group in paths for path in group if path.suffix == ".py"}
        if not files:
            raise FileNotFoundError(f"octavo/{pattern} holds no Python file: it moved; change docs/tools/size.py")
        found |= files
    return found


def size_of(paths: Iterable[Path]) -> Size:
    """Lines and code of files."""
    sizes = [_count(path.read_text(encoding="utf-8")) for path in paths]
    return Size(sum(s.lines for s in sizes), sum(s.code for s in sizes))


def _count(source: str) -> Size:
    kept = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_owner = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if is_owner and ast.get_docstring(node, clean=False) is not None:
            kept -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return Size(source.count("\n"), len(kept))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown; columns of numbers to the right."""
    rules = ("---:" if name in ("Lines", "Code") else "---" for name in head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, tuple(rules), *rows))


if __name__ == "__main__":
    sys.exit(main())
