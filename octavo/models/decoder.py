"""Decoder: the one model definition that trains, scores and samples; who attends to what is the context's affair."""

import torch
from torch import nn

from octavo.deprecation import former_keywords
from octavo.distributed.tensor_group import RowShare, TensorGroup, whole
from octavo.distributed.token_shards import TokenShards
from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.models.checkpoint.kv_scales import KVScales
from octavo.models.config import ModelConfig
from octavo.models.initial import initial_weights
from octavo.nn import (
    MLP,
    Attention,
    AttentionContext,
    ConversionReport,
    DecoderLayer,
    GeluMLP,
    LayerNorm,
    Linear,
    ParallelDecoderLayer,
    RMSNorm,
    RotaryEmbedding,
    SparseMoE,
    convert,
    mark_weights_updated,
)
from octavo.nn.conversion import is_ignored
from octavo.nn.cut_embedding import embed
from octavo.nn.functional.norm_linear import Addend
from octavo.nn.fusion import FusedLayer
from octavo.nn.overrides import checked_names
from octavo.numerics import Numerics
from octavo.ops.attention import KVScaleTable
from octavo.ops.gemm.hp_mm import hp_mm

DTYPES = (torch.bfloat16, torch.float32)
Layer = DecoderLayer | ParallelDecoderLayer
# Added to the logit of a masked id. Its exp is 0 at any temperature, and unlike -inf it makes no NaN of 0 times itself.
MASKED = -1e30


class Decoder(FusedLayer):
    """A decoder-only transformer; modules carry Hugging Face's names, q/k/v and gate/up fused.

    Args:
        config: the architecture.
        dtype: of parameters and activations, torch.bfloat16 or torch.float32.
        device: where the parameters are; None is the CPU. "meta" leaves them without values.
        seed: of the initial weights; the same seed gives the same weights in every process and on every device, in
            bf16 the fp32 ones rounded.

    Attributes:
        numerics: recipe, KV format and exactness (change them by set_numerics).
        conversion_report: what set_numerics last did to each linear, None before.
        weight_version: grows by one at each commit of new weights.
        kv_scales: known scales of the KV cache that a checkpoint came with, one KVScales a layer, or none.
        tensor_group: the ranks among which linears and vocabulary are cut (octavo.parallel.parallelize), or None.
        token_shards: how these cut the tokens between linears where gradients are enabled, or None.
        kv_table: the scales that trainer and engine write K and V under where numerics.kv_scales asks for one of each a
            layer, else None; set_numerics makes it.

    Raises:
        DtypeError: another dtype.
    """

    logit_mask: torch.Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise DtypeError(f"a Decoder's dtype must be torch.bfloat16 or torch.float32, got {dtype!r}")
        self.config = config
        self.numerics = Numerics()
        self.conversion_report: ConversionReport | None = None
        self._build(dtype)
        device = torch.device(device or "cpu")
        if device.type != "meta":
            self.load_state_dict(initial_weights(config, dtype=dtype, seed=seed), assign=True)
            self.to(device)
        self.weight_version = 0
        self.kv_scales: tuple[KVScales, ...] = ()
        self.kv_table: KVScaleTable | None = None
        self.tensor_group: TensorGroup | None = None
        self.token_shards: TokenShards | None = None
        self.register_buffer("logit_mask", None, persistent=False)
        # Resuming or any other load is a commit too.
        self.register_load_state_dict_post_hook(_commit_loaded)

    def _build(self, dtype: torch.dtype) -> None:
        """Modules without values: those come from initial_weights or a checkpoint."""
        config, hidden = self.config, self.config.hidden_size
        weight = torch.empty(config.vocab_size, hidden, device="meta", dtype=dtype)
        # given its weight, for drawing one on "meta" would import the compiler, which takes seconds
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, _weight=weight)
        rope = RotaryEmbedding(
            config.rotary_dim or config.head_dim,
            config.max_position_embeddings,
            config.rope_theta,
            config.rope_scaling,
            interleaved=config.is_parallel,
        )
        self.layers = nn.ModuleList(self._build_layer(i, rope, dtype) for i in range(config.num_layers))
        norm = LayerNorm if config.is_parallel else RMSNorm
        self.norm = norm(hidden, config.rms_norm_eps, dtype=dtype, device="meta")
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(hidden, config.vocab_size, config.is_parallel, dtype=dtype, device="meta")

    def _build_layer(self, layer_index: int, rope: RotaryEmbedding, dtype: torch.dtype) -> Layer:
        config, hidden, eps = self.config, self.config.hidden_size, self.config.rms_norm_eps
        attention = Attention(
            *(hidden, config.num_heads, config.num_kv_heads, config.head_dim),
            layer_index=layer_index,
            rope=rope,
            qkv_bias=config.attention_bias,
            out_bias=config.out_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            dtype=dtype,
            device="meta",
        )
        if config.is_parallel:
            gelu = GeluMLP(hidden, config.intermediate_size, dtype=dtype, device="meta")
            return ParallelDecoderLayer(attention, gelu, hidden, eps, dtype=dtype, device="meta")
        mlp: MLP | SparseMoE
        if config.has_experts(layer_index):
            mlp = SparseMoE(
                *(hidden, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok),
                norm_topk_prob=config.norm_topk_prob,
                aux_loss_coef=config.router_aux_loss_coef,
                dtype=dtype,
                device="meta",
            )
        else:
            mlp = MLP(hidden, config.intermediate_size, dtype=dtype, device="meta")
        return DecoderLayer(attention, mlp, hidden, eps, dtype=dtype, device="meta")

    def forward(self, token_ids: torch.Tensor, context: AttentionContext | None = None) -> torch.Tensor:
        """Hidden states after the final norm.

        Args:
            token_ids: [T] int64, the packed tokens that the context describes.
            context: positions and attention of these tokens (nn.PackedContext, or the engine's paged cache).
        Returns:
            [T, hidden_size] of the model's dtype; head_weight turns it into logits.
        Raises:
            ShapeError: there is no context, token_ids is no vector, or its length is not the context's.
            DtypeError: it holds no int64.
        """
        if context is None:
            raise ShapeError(
                "a Decoder takes packed tokens [T] and the context that says where sequences begin: model(token_ids, "
                "octavo.nn.PackedContext.from_lengths([T], model.numerics, model.device, model.kv_table)); "
                "octavo.sequence_logprobs scores lists of tokens, octavo.LLM(model).generate samples"
            )
        if token_ids.dtype != torch.int64:
            raise DtypeError(f"token_ids must be int64, got {token_ids.dtype}")
        if token_ids.dim() != 1 or token_ids.shape != context.positions.shape:
            raise ShapeError(
                f"token_ids must be the context's packed tokens {tuple(context.positions.shape)}, got shape "
                f"{tuple(token_ids.shape)}; sequences follow each other without padding"
            )
        shards = self.token_shards if torch.is_grad_enabled() else None
        if shards is not None:
            shards.num_tokens = len(token_ids)
        x: torch.Tensor | RowShare = embed(self.embed_tokens, token_ids, shards)  # [T, hidden_size]
        addend: Addend | None = None
        for layer in self.layers:
            if not torch.is_grad_enabled() and self.fuses(layer):
                x, addend = layer.advance(x, addend, context)  # type: ignore[operator]
            else:
                x, addend = layer(whole(x) if addend is None else whole(x) + whole(addend), context), None
        hidden = self.norm(whole(x) if addend is None else whole(x) + whole(addend))
        return hidden if shards is None else shards.join(hidden)

    def fused_modules(self) -> list[nn.Module]:
        """See FusedLayer: without gradients the sum at the end of a layer is made by the next one's norm."""
        return list(self.layers)

    def logits(self, hidden: torch.Tensor, *, deals_rows: bool = False) -> torch.Tensor:
        """Logits for sampling: [T, hidden_size] -> [T, vocab_size] fp32. Training goes through nn.token_logprobs.

        Of a head that is cut among ranks they have no gradient.

        Args:
            deals_rows: of such a head, this rank's share of the rows (TensorGroup.share_of) alone, until the next call.
        """
        weight, bias = self.head_weight, self.head_bias
        own = hp_mm(hidden, weight, bias=bias, out_dtype=torch.float32, exact=self.numerics.exact)
        if self.head_group is None:
            return own
        return self.head_group.deal_columns(own) if deals_rows else self.head_group.gather(own)

    @property
    def head_group(self) -> TensorGroup | None:
        """The ranks among which the head's rows are cut, or None: head_weight and head_bias are this rank's rows."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return self.tensor_group if getattr(head, "is_cut", False) else None

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocab_size, hidden_size]: lm_head's weight, or the embedding where they are tied; see head_group."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        assert weight is not None, "lm_head is never quantized"
        return weight

    @property
    def head_bias(self) -> torch.Tensor | None:
        """[vocab_size], added to the logits: lm_head's bias (GPT-J) and mask_padded_ids' mask; None for neither.

        Under a head_group this rank's rows of it.
        """
        bias, mask = None if self.lm_head is None else self.lm_head.bias, self.logit_mask
        if mask is not None and self.head_group is not None:
            mask = mask.chunk(self.head_group.size)[self.head_group.rank]
        if bias is None or mask is None:
            return mask if bias is None else bias
        return bias + mask

    def mask_padded_ids(self, num_ids: int) -> int:
        """Leave the ids from num_ids on without probability, in sampling and in scoring alike.

        A model's vocabulary is often padded beyond its tokenizer's. Log-probabilities are then those of a softmax over
        the other ids: all that reads head_bias computes them so. It is no part of the state dict.

        Args:
            num_ids: the tokenizer's; ids that end a sequence stay.
        Returns:
            How many ids are masked; nothing is changed where there are none.
        """
        mask = torch.zeros(self.config.vocab_size, device=self.device)  # [V] fp32
        mask[num_ids:] = MASKED
        mask[[i for i in self.config.eos_token_ids if i < len(mask)]] = 0.0
        num_masked = int((mask != 0).sum())
        if num_masked:
            self.logit_mask = mask
        return num_masked

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def num_local_heads(self) -> tuple[int, int]:
        """Query heads and KV heads of a layer on this rank: all of them, but for a model that is cut among ranks."""
        attention = self.layers[0].self_attn
        return attention.num_heads, attention.num_kv_heads  # type: ignore[return-value,union-attr]

    @property
    def num_params(self) -> int:
        """Parameters of the architecture, however they are stored."""
        return self.config.num_params

    def mark_weights_updated(self) -> None:
        """Commit new weights: the version grows and every 8-bit copy of the old ones is dropped."""
        mark_weights_updated(self)

    @former_keywords(skip="ignore")
    def set_numerics(self, numerics: Numerics, *, ignore: tuple[str, ...] = ()) -> ConversionReport:
        """Change how the model computes: the linears' recipe, the KV cache's format, exactness.

        The parameters stay as they are. A high-precision recipe leaves the linears open to octavo.autocast.

        Args:
            ignore: linears left in high precision besides lm_head, by full name, last part or a module above.
        Returns:
            What became of each linear; also kept as conversion_report.
        Raises:
            RecipeError: the model holds FP8 codes only, and the recipe needs others, or ignore names no linear;
                nothing is changed then.
        """
        checked_names(ignore, "ignore")
        ignore = tuple(dict.fromkeys((*ignore, "lm_head")))  # head_weight is always used in high precision
        for name, module in self.named_modules():
            if isinstance(module, Linear) and module.weight is None:
                _check_codes(name, module, numerics, ignore)
        self.conversion_report = convert(self, numerics.recipe, ignore=ignore, exact=numerics.exact)
        if not numerics.recipe.is_fp8:
            for module in self.modules():
                if isinstance(module, Linear):
                    module.recipe = None
        self.numerics = numerics
        has_table = numerics.has_known_kv_scales
        self.kv_table = KVScaleTable(self.config.num_layers, numerics.kv_scales, self.device) if has_table else None
        return self.conversion_report


def _commit_loaded(model: Decoder, _: object) -> None:
    model.mark_weights_updated()


def _check_codes(name: str, linear: Linear, numerics: Numerics, ignore: tuple[str, ...]) -> None:
    if not numerics.recipe.is_fp8 or is_ignored(name, ignore):
        raise RecipeError(
            f"{name} holds FP8 codes only and cannot run in high precision; load the checkpoint with "
            f"recipe={numerics.recipe.name!r}"
        )
    linear.quantized_weight(numerics.recipe)  # raises for another recipe's codes
