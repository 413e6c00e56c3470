"""RequestLimits: what a request must keep to for an engine to serve it at all."""

import dataclasses

from octavo.errors import RequestError
from octavo.models import ModelConfig
from octavo.ops.attention import PAGE_SIZE
from octavo.serve.engine.config import EngineConfig
from octavo.serve.sampling_params import ParameterError, SamplingParams


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Of one engine.

    Args:
        max_model_len: longest sequence, prompt and output, in tokens.
        num_kv_pages: of its cache.
    """

    model: ModelConfig
    engine: EngineConfig
    max_model_len: int
    num_kv_pages: int

    def check(self, prompt_ids: list[int], params: SamplingParams, *, has_tokenizer: bool) -> None:
        """Refuse what can never be served; see Engine.make_input.

        Raises:
            RequestError: it can never be served.
        """
        vocab_size = self.model.vocab_size
        if not prompt_ids:
            raise RequestError(
                "a prompt needs at least one token, got none, and no BOS token is known; give a start token for free "
                "generation"
            )
        # in C: a prompt may have a million tokens
        if {*map(type, prompt_ids)} != {int} or min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            bad = next(t for t in prompt_ids if type(t) is not int or not 0 <= t < vocab_size)
            raise RequestError(f"prompt token ids must be integers from 0 to {vocab_size - 1}, got {bad!r}")
        if len(prompt_ids) + (params.max_tokens != 0) > self.max_model_len:
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens, {self._limit_text()}; shorten it")
        if params.stop_strings and not has_tokenizer:
            raise ParameterError("stop", "strings need a tokenizer, and this engine has none; use stop_token_ids")
        biased = next((t for t in params.logit_bias or () if t >= vocab_size), None)
        if biased is not None:
            raise ParameterError("logit_bias", f"names token {biased}, but the vocabulary ends at {vocab_size - 1}")

    def _limit_text(self) -> str:
        if self.max_model_len == self.model.max_position_embeddings:
            return f"but the model's context is {self.max_model_len}, one of them for the output"
        if self.max_model_len == self.engine.max_model_len:
            return f"but max_model_len is {self.max_model_len}, one of them for the output"
        return (
            f"but the whole KV cache holds {self.max_model_len} ({self.num_kv_pages} pages of {PAGE_SIZE}), "
            "one of them for the output; raise num_kv_pages or gpu_memory_utilization"
        )
