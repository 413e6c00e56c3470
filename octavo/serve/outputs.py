"""What generate returns, in vLLM's shape: a RequestOutput for each prompt, a CompletionOutput for each sample."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: log_softmax(logits / temperature), untruncated, natural log; an fp32 value. At temperature 0: of
            temperature 1.
        rank: 1 for the most probable token; None where only the sampled token was asked for (logprobs=0).
    """

    logprob: float
    rank: int | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample.

    Attributes:
        index: which of the request's n samples.
        text: the decoded output, cut before a stop string; "" without a tokenizer.
        token_ids: every token generated, the one that ended it included.
        logprobs: for each token a dict token id -> Logprob, the sampled token always in it; None if not asked for.
        cumulative_logprob: sum over the sampled tokens; None if logprobs were not asked for.
        finish_reason: "stop" (end of sequence, stop token or stop string), "length", "abort", "error", or None while it
            runs.
        stop_reason: the stop string or stop token id that ended it, or an error's text; None for end of sequence and
            length.
        weight_versions: for each token the version of the weights that made it.
        routed_experts: [prompt and output tokens - 1, layers with experts, experts a token] uint8 (int16 for more than
            256 experts) on the CPU: where each token that was computed went (the last one sampled was not), the
            likeliest expert first. None unless the LLM was made with enable_return_routed_experts, and until the
            sample is finished.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None
    weight_versions: list[int]
    routed_experts: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """One prompt with its samples.

    Attributes:
        request_id: counts the engine's requests from 0.
        prompt: the prompt's text, or None if it came as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: the n samples, by index.
        prompt_logprobs: for each token of the prompt what CompletionOutput.logprobs has for the output's, None for the
            first; None if not asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
