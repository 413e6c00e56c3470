"""`fuse`: the order of the passes, and the list of what they left."""

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from octavo.errors import RecipeError
from octavo.qdq.fused import fp8_linear
from octavo.qdq.gemms import PRODUCTS, Gemm, fuse_gemms, match_gemm, merge_siblings
from octavo.qdq.graph import DEQUANTIZE, Dequantize, Rewriter, argument, arguments, describe, is_call
from octavo.qdq.moves import REARRANGING, SPLITTING, move_pairs
from octavo.qdq.producers import fuse_producers
from octavo.qdq.report import LeftOver, Report
from octavo.qdq.spelling import normalize_spelling


def fuse(
    program: ExportedProgram, *, fast_accum: bool = False, accept_decomposed: bool = False
) -> tuple[GraphModule, Report]:
    """Rewrite a graph with explicit Q/DQ pairs to fused FP8 ops, for inference.

    Args:
        program: from torch.export.export of a model in eval mode, or from octavo.qdq.onnx.from_onnx. It is not changed.
        fast_accum: let a GPU keep long sums in its matrix units, as in octavo.ops.gemm.scaled_mm: quicker, 40 dB near.
        accept_decomposed: also read quantized_decomposed.quantize_per_tensor as an octavo Q. That op rounds to whole
            numbers before it rounds to FP8, so the result then differs from the unfused graph's (it is closer).
    Returns:
        (a module with the program's inputs and outputs, the report). Weights that only FP8 products read exist as
        codes alone.
    Raises:
        RecipeError: a constant scale that is not positive and finite.
    Exactness: docs/qdq.md.
    """
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule), "torch.export unlifts to a GraphModule"
    rewriter = Rewriter(module)
    normalize_spelling(rewriter, accept_decomposed=accept_decomposed)
    move_pairs(rewriter)
    fuse_gemms(rewriter, fast_accum=fast_accum)
    fuse_producers(rewriter)
    merge_products(rewriter)
    list_left_dequantizes(rewriter)
    list_foreign_pairs(rewriter)
    module.graph.eliminate_dead_code()
    _drop_unread(module)
    module.graph.lint()
    module.recompile()
    order = {node.name: index for index, node in enumerate(rewriter.graph.nodes)}
    rewriter.report.fused.sort(key=lambda site: order[site.name])
    rewriter.report.left_over.sort(key=lambda left: order[left.name])
    module.register_forward_pre_hook(_refuse_gradients, with_kwargs=True)
    return module, rewriter.report


def _refuse_gradients(_module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """The ops of a fused graph have no backward: gradients would be lost without a word."""
    inputs = tree_leaves((args, kwargs)) if torch.is_grad_enabled() else []
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        raise RecipeError(
            "a fused graph is for inference, and an input wants a gradient; detach it, or use torch.no_grad"
        )


def merge_products(rewriter: Rewriter) -> None:
    """Products of the same codes (q, k and v) as one, but for those that an activation reads straight."""
    groups: dict[Node, list[Node]] = {}
    activations = {site.name for site in rewriter.report.fused if "activation" in site.op}
    for node in rewriter.nodes(fp8_linear):
        if not any(user.name in activations for user in node.users):
            groups.setdefault(argument(node, 0), []).append(node)
    for nodes in groups.values():
        merge_siblings(rewriter, nodes)


def list_left_dequantizes(rewriter: Rewriter) -> None:
    """Every DQ that still runs, once a reader."""
    for node in rewriter.nodes(DEQUANTIZE):
        dq = rewriter.dequantize(node)
        assert dq is not None, "a DQ node"
        for reader in node.users:
            reason, remedy = why_left(rewriter, dq, reader)
            rewriter.report.left_over.append(LeftOver(node.name, "DQ", "qdq_dequantize", reason, remedy))


def why_left(rewriter: Rewriter, dq: Dequantize, reader: Node) -> tuple[str, str]:
    """(reason, remedy) of a DQ before one reader."""
    if is_call(reader, *PRODUCTS):
        found = match_gemm(rewriter, reader)
        assert not isinstance(found, Gemm), "else it were fused"
        return found.reason, found.remedy
    if is_call(reader, *REARRANGING, *SPLITTING) and dq.kind != "per_tensor":
        return f"a {dq.kind} scale does not pass through {describe(reader)}", "use one scale a tensor"
    if reader.name in {left.name for left in rewriter.report.left_over}:
        return "it is quantized again with another scale", "use one scale for both pairs"
    return f"{describe(reader)} reads high precision", "drop the pair there, or accept its kernel"


def list_foreign_pairs(rewriter: Rewriter) -> None:
    """quantized_decomposed pairs that were not taken over."""
    for node in rewriter.nodes():
        text = str(node.target)
        if not text.startswith("quantized_decomposed."):
            continue
        op = "DQ" if "dequantize" in text else "Q"
        rounds_twice = op == "Q" and "per_tensor" in text and "float8" in str(arguments(node)[-1])
        reason = "it rounds to whole numbers before FP8" if rounds_twice else "octavo reads per-tensor FP8 pairs alone"
        remedy = "use octavo.qdq.quantize, or fuse(accept_decomposed=True)" if rounds_twice else "use octavo.qdq's pair"
        rewriter.report.left_over.append(LeftOver(node.name, op, text, reason, remedy))


def _drop_unread(module: GraphModule) -> None:
    """Forget parameters and buffers that the graph no longer reads: the high-precision weights above all."""
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    stored = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for path, value in stored:
        parent, _, name = path.rpartition(".")
        holder = module.get_submodule(parent)
        if path not in read:
            delattr(holder, name)
        elif isinstance(value, torch.nn.Parameter):  # takes no gradient here; the caller's own is left as it is
            setattr(holder, name, torch.nn.Parameter(value.detach(), requires_grad=False))
