"""POST /tokenize and /detokenize, GET /tokenizer_info: text to token ids and back, as the model sees it."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from octavo.errors import OctavoError
from octavo.serve.http.body import body_of, openapi_of
from octavo.serve.http.chat import encode_chat
from octavo.serve.http.errors import ApiError, as_api_error
from octavo.serve.http.schema import DetokenizeRequest, TokenizeRequest
from octavo.serve.http.service import ServiceOf, require_api_key
from octavo.serve.http.texts import SHORT
from octavo.serve.http.token_text import GrowingText, TokenTexts

# tokens that /tokenize lists: some tens of milliseconds of JSON
MAX_LISTED = 1 << 18

router = APIRouter(dependencies=[Depends(require_api_key)])


@router.post("/tokenize", openapi_extra=openapi_of(TokenizeRequest))
async def tokenize(
    service: ServiceOf, body: Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))]
) -> dict[str, Any]:
    """Token ids of a text or of a conversation."""
    service.check_model(body.model)
    engine = service.ready_engine()
    try:
        if body.prompt is not None:
            ids = await service.texts.encode(
                service.tokenizer(),
                body.prompt,
                add_special_tokens=body.add_special_tokens is not False,
                most=MAX_LISTED,
                field="prompt",
            )
        else:
            add_prompt = body.add_generation_prompt is not False
            ids, _ = await encode_chat(service, body.messages or [], add_prompt, body.chat_template_kwargs or {})
    except OctavoError as error:
        raise as_api_error(error, "messages" if body.prompt is None else "prompt") from error
    texts = TokenTexts(engine.tokenizer)
    if body.return_token_strs and len(ids) > SHORT:
        text = f"the text has {len(ids)} tokens, and {SHORT} are the most that are shown one by one; leave it out"
        raise ApiError(400, text, "return_token_strs", "invalid_value")
    strings = GrowingText(texts).echo(ids, texts.join(ids))[0] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strings}


@router.post("/detokenize", openapi_extra=openapi_of(DetokenizeRequest))
async def detokenize(
    service: ServiceOf, body: Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))]
) -> dict[str, str]:
    """The text of token ids, special tokens included; those that only the model knows have none."""
    service.check_model(body.model)
    vocab_size = service.ready_engine().model.config.vocab_size
    try:
        return {"prompt": await service.texts.decode(service.tokenizer(), body.tokens, vocab_size)}
    except OctavoError as error:
        raise as_api_error(error, "tokens") from error


@router.get("/tokenizer_info")
async def tokenizer_info(service: ServiceOf) -> dict[str, Any]:
    """What lm-eval asks for before it trusts a remote tokenizer."""
    tokenizer = service.tokenizer()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
