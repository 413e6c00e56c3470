"""What a caller sees of a request and of its sequences."""

import math

from octavo.models.stream_decoder import StreamDecoder
from octavo.models.tokenizer import Tokenizer
from octavo.serve.engine.request import RequestState
from octavo.serve.engine.sequence import Sequence
from octavo.serve.outputs import CompletionOutput, Logprob, RequestOutput, with_texts


def make_output(request: RequestState, tokenizer: Tokenizer | None) -> RequestOutput:
    """A request's state as its caller sees it."""
    assert request.request_id is not None, "it was admitted"
    return RequestOutput(
        request.request_id,
        request.input.prompt,
        request.input.prompt_ids,
        [_make_completion(seq, tokenizer) for seq in request.sequences],
        _prompt_logprobs(request, tokenizer),
        request.num_cached_tokens,
    )


def _prompt_logprobs(request: RequestState, tokenizer: Tokenizer | None) -> list[dict[int, Logprob] | None] | None:
    """With the tokens' texts, which all states of a stream share."""
    if request.prompt_logprobs_with_texts is not None:
        return request.prompt_logprobs_with_texts
    found = request.prompt_logprobs
    if found is None or tokenizer is None:
        return found
    found = [entry and with_texts(entry, tokenizer.text_of) for entry in found]
    if not request.sequences[0].scores_prompt:
        request.prompt_logprobs_with_texts = found
    return found


def _make_completion(seq: Sequence, tokenizer: Tokenizer | None) -> CompletionOutput:
    text_of = None if tokenizer is None else tokenizer.text_of
    logprobs = seq.logprobs.copy(text_of) if seq.params.logprobs is not None else None
    return CompletionOutput(
        index=seq.index,
        text=_text(seq, tokenizer),
        token_ids=seq.output_token_ids,
        logprobs=logprobs,
        cumulative_logprob=None if logprobs is None else math.fsum(logprobs.sampled),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        weight_versions=list(seq.weight_versions),
        routed_experts=None if seq.routed_experts is None else seq.routed_experts.wait(),
    )


def _text(seq: Sequence, tokenizer: Tokenizer | None) -> str:
    """The output's text; the token that ended it has none, and ids that only the model knows have none."""
    if seq.detokenizer is not None:
        return seq.detokenizer.text if seq.is_finished else seq.detokenizer.settled_text
    if tokenizer is None:
        return ""
    ids = seq.output_token_ids
    if seq.finish_reason == "stop":
        ids.pop()
    return StreamDecoder(tokenizer, context=seq.token_ids[: seq.prompt_len]).push_all(ids)
