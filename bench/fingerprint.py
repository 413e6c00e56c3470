"""Whether two trees compute the same bits: `python -m bench.fingerprint --write before.json`, then `--against` it.

A case trains a small model for five steps, scores sequences and generates at three batch sizes; each of these parts is
one SHA-256; a case that a tree refuses is recorded with the message. `--part 1/4` shares the work among processes,
`--compare A B` says what differs between two files or two folders of parts, and `--out FOLDER` records it. The figures
are those of one machine and one set of libraries: they compare trees, never machines. An older tree runs this file with
PYTHONPATH set to its folder.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

import octavo
from octavo.errors import RecipeError
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, get_recipe
from octavo.train.data import Batch, make_batch
from octavo.train.step import summed_loss

try:
    from octavo.run.optimizer import MasterAdamW
    from octavo.run.sections import OptimizerSection
except ModuleNotFoundError:  # trees up to dc336e5
    from octavo.train.optimizer import MasterAdamW  # type: ignore[import-not-found,no-redef]

    from octavo.train.config import OptimizerSection  # type: ignore[attr-defined,no-redef]

RECIPES = ("bf16", "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
FAMILIES = ("qwen3", "qwen3_moe", "gptj")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# "even": blocks of 128 end with the fused weights' parts, so that fused steps run; "ragged": they do not
SHAPES = {"even": (256, 384, 64), "ragged": (192, 344, 48)}  # hidden_size, intermediate_size, head_dim
STEPS, MICRO_BATCHES, VOCAB = 5, 2, 331
BATCH_SIZES = (1, 3, 8)
REFUSED = "refused"  # in place of a case's parts: why the tree does not run it
EXACT_RECIPES = ("bf16", "rowwise", "blockwise")


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """One model under one recipe.

    Attributes:
        family: of FAMILIES, or "modules" (octavo.nn's fused layers) or "autocast" (torch's own linears).
        shape: of SHAPES.
    """

    recipe: str
    family: str
    dtype: str
    shape: str

    def __str__(self) -> str:
        return f"{self.family}-{self.shape}-{self.dtype}-{self.recipe}"


def all_cases() -> list[ModelCase]:
    """Every case, Decoders first."""
    decoders = [ModelCase(*fields) for fields in itertools.product(RECIPES, FAMILIES, DTYPES, SHAPES)]
    return decoders + [
        ModelCase(*fields) for fields in itertools.product(RECIPES, ("modules", "autocast"), DTYPES, SHAPES)
    ]


def fingerprint(case: ModelCase, device: str) -> dict[str, str]:
    """The case's parts, each as 16 hex digits."""
    torch.manual_seed(0)
    if case.family == "modules":
        return _of_module(_build_modules(case).to(device), case, device)
    if case.family == "autocast":
        return _of_module(_build_torch(case).to(device), case, device)
    return _of_decoder(case, device)


def _of_decoder(case: ModelCase, device: str) -> dict[str, str]:
    model = Decoder(_architecture(case), dtype=DTYPES[case.dtype], device=device, seed=0)
    _set_numerics(model, Numerics(get_recipe(case.recipe)))
    model.train()
    optimizer = MasterAdamW(model, OptimizerSection())
    losses, gradients = [], []
    for batches in _batches():
        for batch in batches:
            loss = summed_loss(model, batch.to(device)) / sum(each.num_targets for each in batches)
            loss.backward()
            losses.append(loss.detach())
            gradients += [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
            optimizer.accumulate_gradients()
        losses.append(optimizer.clip_gradients(1.0))
        optimizer.step(lr=1e-3)
    found = {"losses": digest(losses), "gradients": digest(gradients), "parameters": digest(model.parameters())}
    found["fp8_state"] = digest(octavo.nn.fp8_state_dict(model)[key] for key in sorted(octavo.nn.fp8_state_dict(model)))
    model.eval()
    sequences = [list(range(7 * i % 90, 7 * i % 90 + 5 + 9 * i)) for i in range(5)]
    for exact in (False, True) if case.recipe in EXACT_RECIPES else (False,):
        kv_cache_dtype = "bf16" if case.recipe == "bf16" else "fp8"
        _set_numerics(model, Numerics(get_recipe(case.recipe), kv_cache_dtype=kv_cache_dtype, exact=exact))
        name = "exact " if exact else ""
        with torch.no_grad():
            found[f"{name}logprobs"] = digest(octavo.sequence_logprobs(model, sequences))
        found[f"{name}generated"] = digest(_generate(model))
    return found


def _set_numerics(model: Decoder, numerics: Numerics) -> None:
    model.set_numerics(numerics)
    if numerics.recipe.is_emulated and model.config.num_experts:  # experts do not run under these
        octavo.convert(model, numerics.recipe, overrides={"experts": "bf16"})


def _generate(model: Decoder) -> Iterator[torch.Tensor]:
    """Tokens and their log-probabilities at three batch sizes, greedy and sampled, from one engine after the other."""
    prompts = [[(11 * i + 3 * j) % VOCAB for j in range(3 + 13 * i)] for i in range(max(BATCH_SIZES))]
    for size in BATCH_SIZES:
        llm = octavo.LLM(model, max_num_seqs=8, num_kv_pages=64, seed=0, warm_up=False)
        for temperature in (0.0, 1.0):
            params = octavo.SamplingParams(temperature=temperature, max_tokens=6, logprobs=0, ignore_eos=True)
            for output in llm.generate(prompts[:size], params):
                answer = output.outputs[0]
                assert answer.logprobs is not None, "asked for"
                yield torch.tensor(answer.token_ids)
                yield torch.tensor([step[t].logprob for step, t in zip(answer.logprobs, answer.token_ids, strict=True)])


def _of_module(model: nn.Module, case: ModelCase, device: str) -> dict[str, str]:
    """Steps under octavo.autocast and torch's own optimizer, which octavo has to notice."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
    generator = torch.Generator().manual_seed(1)
    width = SHAPES[case.shape][0]
    outputs, gradients = [], []
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(2, 40, width, generator=generator).to(device, DTYPES[case.dtype]).requires_grad_()
            with octavo.autocast(recipe=case.recipe):
                out = model(x)
            out.float().square().mean().backward()
            outputs.append(out.detach())
            assert x.grad is not None
            gradients += [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    found = {"outputs": digest(outputs), "gradients": digest(gradients), "parameters": digest(model.parameters())}
    return found | {"fp8_state": digest(octavo.nn.fp8_state_dict(model).values())}


def _build_modules(case: ModelCase) -> nn.Module:
    """One of each fused layer, with biases and without."""
    (hidden, inner, head_dim), dtype = SHAPES[case.shape], DTYPES[case.dtype]
    return nn.Sequential(
        octavo.nn.LayerNormLinear(hidden, hidden, dtype=dtype),
        octavo.nn.LayerNormMLP(hidden, inner, dtype=dtype),
        octavo.nn.TransformerLayer(hidden, inner, hidden // head_dim, dtype=dtype),
        octavo.nn.Linear(hidden, hidden, bias=True, dtype=dtype),
    )


def _build_torch(case: ModelCase) -> nn.Module:
    (hidden, inner, _), dtype = SHAPES[case.shape], DTYPES[case.dtype]
    layers = [nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden, bias=False), nn.LayerNorm(hidden)]
    return nn.Sequential(*layers, nn.Linear(hidden, hidden)).to(dtype)


def _architecture(case: ModelCase) -> ModelConfig:
    hidden, inner, head_dim = SHAPES[case.shape]
    heads = hidden // head_dim
    fields: dict[str, float] = (
        {"rotary_dim": 16, "attention_bias": False} if case.family == "gptj" else {"qk_norm": True}
    )
    if case.family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128 if hidden == 256 else 96}
        fields |= {**experts, "norm_topk_prob": True, "router_aux_loss_coef": 0.01}
    return ModelConfig(
        family=case.family,
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=heads if case.family == "gptj" else heads // 2,
        head_dim=head_dim,
        max_position_embeddings=512,
        **fields,  # type: ignore[arg-type]
    )


def _batches() -> Iterator[list[Batch]]:
    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        lengths = [(61, 38), (100,)]
        yield [make_batch([draw.integers(0, VOCAB, n + 1) for n in some], None) for some in lengths[:MICRO_BATCHES]]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits of the tensors' shapes, dtypes and bytes, in order."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        total.update(f"{tuple(flat.shape)} {flat.dtype}".encode())
        total.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def fingerprint_or_refusal(case: ModelCase, device: str) -> dict[str, str]:
    """The case's parts, or, where this tree refuses the case, its message as the one part."""
    try:
        return fingerprint(case, device)
    except RecipeError as error:
        return {REFUSED: str(error)}


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """Lines about every part that differs, and about every case that only one side has or refuses."""
    lines = []
    for case in sorted(before.keys() | after.keys()):
        old, new = before.get(case), after.get(case)
        if old is None or new is None:
            lines.append(f"{case}: only in {'the second' if old is None else 'the first'}")
        elif REFUSED in old or REFUSED in new:
            if (REFUSED in old) != (REFUSED in new):
                refusing, message = ("first", old[REFUSED]) if REFUSED in old else ("second", new[REFUSED])
                lines.append(f"{case}: refused by the {refusing} alone: {message}")
        else:
            lines += [
                f"{case}: {part}: {old.get(part)} in the first, {new.get(part)} in the second"
                for part in sorted(old.keys() | new.keys())
                if old.get(part) != new.get(part)
            ]
    return lines


def choose_cases(wanted: Sequence[str], part: tuple[int, int] = (1, 1)) -> list[ModelCase]:
    """Every n-th of the cases whose name holds one of some texts; all cases where there are no texts.

    Args:
        part: (k, n): the k-th of n parts, which together are all of them.
    """
    cases = [case for case in all_cases() if not wanted or any(text in str(case) for text in wanted)]
    return cases[part[0] - 1 :: part[1]]


def main(arguments: list[str] | None = None) -> int:
    """Compute, print, and compare where asked; 1 where a part differs."""
    options = _parse(arguments)
    if options.compare is not None:
        before, after = (_load_cases(path) for path in options.compare)
        if options.out is not None:
            _save_record(before, after, options)
        return _report(before, after, only_common=False)
    if options.device == "cuda":  # the backward of attention sums in a fixed order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    cases = choose_cases(options.filter, options.part)
    began = time.perf_counter()
    found: dict[str, dict[str, str]] = {}
    for case in cases:
        found[str(case)] = fingerprint_or_refusal(case, options.device)
        _save(options.write, options.device, found)  # a run that is stopped keeps what it has
    if options.twice:
        again = {str(case): fingerprint_or_refusal(case, options.device) for case in cases}
        for line in compare(found, again):
            print(f"left out, differs from run to run: {line}")
        found = {c: {p: h for p, h in parts.items() if again[c].get(p) == h} for c, parts in found.items()}
    for name, parts in found.items():
        if REFUSED in parts:
            print(f"{name}: refused: {parts[REFUSED]}")
    num_parts = sum(len(parts) for parts in found.values() if REFUSED not in parts)
    print(f"{len(found)} cases, {num_parts} fingerprints, {time.perf_counter() - began:.0f} s")
    _save(options.write, options.device, found)
    return 0 if options.against is None else _report(_load_cases(options.against), found, only_common=True)


def _save(path: Path | None, device: str, found: dict[str, dict[str, str]]) -> None:
    if path is not None:
        header = {"device": device, "torch": torch.__version__, "threads": torch.get_num_threads()}
        path.write_text(json.dumps(header | {"cases": found}, indent=1) + "\n")


def _report(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]], *, only_common: bool) -> int:
    common = before.keys() & after.keys()
    if only_common:  # a part or a filter has fewer cases than the whole
        before, after = ({case: side[case] for case in common} for side in (before, after))
    lines = compare(before, after)
    num_parts = sum(len(after[case]) for case in common if REFUSED not in after[case])
    print("\n".join([*lines, f"{len(common)} common cases, {num_parts} fingerprints, {len(lines)} differences"]))
    return 1 if lines or not common else 0


def _load_cases(path: Path) -> dict[str, dict[str, str]]:
    parts = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return {name: case for part in parts for name, case in json.loads(part.read_text())["cases"].items()}


def _save_record(
    before: dict[str, dict[str, str]], after: dict[str, dict[str, str]], options: argparse.Namespace
) -> None:
    from bench.record import Record  # which an older tree that runs this file has not

    what = "Bits of training, scoring and generation of two trees on one machine: python -m bench.fingerprint."
    record, peer = Record(f"fingerprints_{options.device}", what, device=options.device), f"octavo at {options.name}"
    refused, refused_before = (sum(REFUSED in parts for parts in side.values()) for side in (after, before))
    record.add("all", "cases", "cases", len(after), peer=peer, peer_value=len(before))
    record.add("all", "cases refused", "cases", refused, peer=peer, peer_value=refused_before)
    record.add("all", "fingerprints", "fingerprints", sum(map(len, after.values())) - refused)
    record.add("all", "differences", "fingerprints", len(compare(before, after)))
    print(record.save(options.out, options.commit))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fingerprint", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--filter", action="append", default=[], help="cases whose name holds this; repeatable")
    parser.add_argument("--part", type=_part, default=(1, 1), help="such as 2/4: the second quarter of the cases")
    parser.add_argument("--write", type=Path, help="file for the fingerprints")
    parser.add_argument("--against", type=Path, help="fingerprints of another tree; cases of both are compared")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="only compare two written files")
    parser.add_argument("--name", default="before", help="what a record of --compare calls the first tree: its commit")
    parser.add_argument("--out", type=Path, help="folder of the record of --compare")
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--twice", action="store_true", help="leave out what differs between two runs, and name it")
    return parser.parse_args(arguments)


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"a part is K/N with 1 <= K <= N, such as 1/4; got {text!r}")
    return int(index), int(count)


if __name__ == "__main__":
    sys.exit(main())
