"""Small random models with lively logits, and the gap between what the sampler and the trainer say of a token."""

import random

import torch

from octavo import load_model, sequence_logprobs
from octavo.models import Decoder, ModelConfig
from octavo.numerics import Numerics, get_recipe
from octavo.serve import RequestOutput

VOCAB = 96
EOS = 0


def make_config(family: str = "qwen3", **overrides: object) -> ModelConfig:
    """Two layers; the MLP's width is no multiple of 128, nor that of the experts."""
    fields: dict[str, object] = {
        "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 344, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "qk_norm": family in ("qwen3", "qwen3_moe"),
        "tie_word_embeddings": family == "qwen3", "attention_bias": family == "qwen2", "eos_token_ids": (EOS,),
    }  # fmt: skip
    if family == "qwen3_moe":
        fields |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 72, "norm_topk_prob": True}
    if family == "gptj":
        fields |= {"num_kv_heads": 4, "rotary_dim": 16}
    return ModelConfig(family=family, **{**fields, **overrides})  # type: ignore[arg-type]


def make_model(
    family: str = "qwen3",
    recipe: str = "blockwise",
    kv_cache_dtype: str = "fp8",
    exact: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
    attention_dtype: str = "bf16",
    **overrides: object,
) -> Decoder:
    """A model whose attention and logits are far from uniform: initial weights are scaled up, biases are random."""
    model = load_model(make_config(family, **overrides), seed=seed, device=device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # GeLU pushes every token's stream one way: a wide head would then name one token for good
                is_small = "embed" in name or (family == "gptj" and "lm_head" in name)
                parameter.mul_(4.0 if is_small else 8.0)
            elif name.endswith(".bias"):
                # those of the residual stream are small, or every token's would be alike
                size = 0.5 if "qkv_proj" in name else 0.05
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    model.mark_weights_updated()
    model.set_numerics(Numerics(get_recipe(recipe), kv_cache_dtype, exact, attention_dtype))
    return model


def random_prompts(count: int, seed: int = 0, num_pages: int = 2) -> list[list[int]]:
    """Prompts that soon need another page, of up to num_pages pages; every second one shares a prefix of 70 tokens."""
    rng = random.Random(seed)
    common = [rng.randrange(1, VOCAB) for _ in range(70)]
    prompts = []
    for i in range(count):
        length = 64 * rng.randrange(i % 2, num_pages) + rng.randrange(44, 64)
        own = [rng.randrange(1, VOCAB) for _ in range(length)]
        prompts.append((common + own)[:length] if i % 2 else own)
    return prompts


def sampler_logprobs(output: RequestOutput) -> list[list[float]]:
    """The sampled tokens' logprobs of each sample."""
    return [
        [entry[token].logprob for entry, token in zip(sample.logprobs or [], sample.token_ids, strict=True)]
        for sample in output.outputs
    ]


def trainer_logprobs(model: Decoder, outputs: list[RequestOutput], temperature: float) -> list[list[torch.Tensor]]:
    """sequence_logprobs of the same output tokens, all samples in one packed batch, with gradient."""
    sequences = [output.prompt_token_ids + sample.token_ids for output in outputs for sample in output.outputs]
    scored = iter(sequence_logprobs(model, sequences, temperature))
    return [[next(scored)[len(output.prompt_token_ids) - 1 :] for _ in output.outputs] for output in outputs]


def max_gap(outputs: list[RequestOutput], trainer: list[list[torch.Tensor]]) -> float:
    """max |delta logprob| over all sampled tokens."""
    gaps = [
        (torch.tensor(sampled) - scored.detach().cpu()).abs().max().item()
        for output, scored_samples in zip(outputs, trainer, strict=True)
        for sampled, scored in zip(sampler_logprobs(output), scored_samples, strict=True)
    ]
    return max(gaps)


def gradient_step(model: Decoder, trainer: list[list[torch.Tensor]], size: float = 0.02) -> None:
    """Move every parameter along the sign of a policy gradient through the scored tokens, and commit it."""
    loss = torch.cat([scored for samples in trainer for scored in samples]).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(size * parameter.abs().mean() * parameter.grad.sign())
    model.mark_weights_updated()
