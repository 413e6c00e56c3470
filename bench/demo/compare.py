"""The second stage: export in FP8, read it back, and compare validation perplexities over the same text."""

import dataclasses
import math
from pathlib import Path

from bench.demo.display import Display
from bench.demo.pretrain import Pretraining
from octavo.models import Decoder, load_model, save_model
from octavo.numerics import Numerics, get_recipe
from octavo.numerics.analysis import TensorReport, analyze_model
from octavo.train.data import validation_batches
from octavo.train.evaluate import validation_loss
from octavo.train.tokens import TokenizedText

EXPORTED = "blockwise"  # the variant that is exported: its weights are quantized in the checkpoint's own blocks
_BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True)
class PerplexityRow:
    """One line of the table: what was evaluated, its mean loss in nats a token, and exp of it."""

    name: str
    linears: str
    kv_cache: str
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the export is worth.

    Attributes:
        rows: the first is the bf16 run, which the others are compared with.
        num_tokens: of validation text in each row.
        export_path: the FP8 checkpoint.
        num_bytes_bf16: the weights in bf16, on disk.
        num_bytes_fp8: the same weights in the FP8 dialect, on disk.
        is_bit_equal: the loss of the export that was read back equals that of the model in memory, as bits.
        tensors: where the exported variant's weights fall in E4M3's range.
    """

    rows: list[PerplexityRow]
    num_tokens: int
    export_path: Path
    num_bytes_bf16: int
    num_bytes_fp8: int
    is_bit_equal: bool
    tensors: list[TensorReport]

    def loss_of(self, name: str) -> float:
        """The loss of a row."""
        return next(row.loss for row in self.rows if row.name == name)


def compare(pretraining: Pretraining, text: TokenizedText, out: Path, device: str, display: Display) -> Comparison:
    """Evaluate every variant in its own precision, then the export, then the export with an FP8 KV cache."""
    config = pretraining.config
    batches = list(
        validation_batches(
            text.validation,
            config.data.seq_len,
            _BATCH_SIZE,
            text.tokenizer.eos_id,
            config.metrics.eval_tokens,
        )
    )
    export_path = out / "export-fp8"
    rows: list[PerplexityRow] = []
    with display.bars() as bars:

        def measure(name: str, model: Decoder) -> None:
            loss = validation_loss(model, batches)
            rows.append(PerplexityRow(name, model.numerics.recipe.name, model.numerics.kv_cache_dtype, loss))
            bars.update(
                "validation", len(rows), len(pretraining.variants) + 2, f"{name}: perplexity {math.exp(loss):.3f}"
            )

        for recipe, variant in pretraining.variants.items():
            model = load_model(variant.model_path, device=device, recipe=recipe)
            measure(f"{recipe} run", model)
            if recipe == EXPORTED:
                save_model(model, export_path, dialect="fp8-block", tokenizer=text.tokenizer)
                tensors = analyze_model(model, recipe)
        exported = load_model(export_path, device=device, recipe=EXPORTED)
        measure("FP8 export, read back", exported)
        exported.set_numerics(Numerics(get_recipe(EXPORTED), kv_cache_dtype="fp8"))
        measure("FP8 export, FP8 KV cache", exported)
    losses = {row.name: row.loss for row in rows}
    return Comparison(
        rows=rows,
        num_tokens=sum(batch.num_targets for batch in batches),
        export_path=export_path,
        num_bytes_bf16=_weight_bytes(pretraining.variants[EXPORTED].model_path),
        num_bytes_fp8=_weight_bytes(export_path),
        is_bit_equal=losses["FP8 export, read back"] == losses[f"{EXPORTED} run"],
        tensors=tensors,
    )


def _weight_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
