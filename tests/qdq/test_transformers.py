"""Whole models of transformers, norms, GeLU and RoPE as it writes them, from torch and through ONNX."""

from collections import Counter

import pytest
import torch
from torch import nn

from octavo.numerics.analysis import sqnr
from octavo.qdq import fuse, insert
from octavo.testing.tolerances import QDQ_FP32_BLOCK_DB

pytestmark = pytest.mark.slow  # transformers takes seconds to import


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=token_ids, use_cache=False).logits


def make_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96)
    return transformers.LlamaForCausalLM(config)


def make_gptj() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, vocab_size=96, n_positions=64)
    return transformers.GPTJForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (make_llama, {"norm": 4, "swiglu": 2, "scaled_mm": 8}),
        (make_gptj, {"norm": 2, "gelu": 2, "scaled_mm": 8}),
    ],
    ids=["Llama", "GPT-J"],
)
def test_a_model_of_transformers(make, wanted: dict[str, int]) -> None:  # type: ignore[no-untyped-def]
    onnx = pytest.importorskip("octavo.qdq.onnx")
    torch.manual_seed(0)
    model, token_ids = Logits(make()).eval(), torch.randint(0, 96, (2, 16))
    insert(model, lambda m: m(token_ids), ignore=("model.lm_head",))
    with torch.no_grad():
        program = torch.export.export(model, (token_ids,), strict=False)
        unfused = model(token_ids)
        module, report = fuse(program)
        fused = module(token_ids)
        again = fuse(onnx.from_onnx(onnx.to_onnx(program)))[0](token_ids)
    kinds = ("norm", "swiglu", "gelu", "scaled_mm")
    assert Counter(kind for site in report.fused for kind in kinds if kind in site.op) == wanted
    assert [left.op for left in report.left_over] == ["Q", "Q"]  # of attention's output, once a layer
    assert sqnr(unfused, fused) >= QDQ_FP32_BLOCK_DB
    assert torch.equal(again, fused)
