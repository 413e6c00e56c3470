"""What clients may send: OpenAI's fields, and vLLM's beside them. Unknown fields are errors, null means left out."""

import logging
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octavo.serve.keywords import CHAT_NAMES, GENERATE_NAMES, SAMPLING_NAMES

Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# of a list the first item at fault is enough: of millions a list of errors would take minutes
TokenIds = Annotated[list[Integer], Field(fail_fast=True)]
# OpenAI takes 300; 1024 keep all the words of a list, and are checked in a millisecond
MAX_LOGIT_BIASES = 1024
# turns of a conversation: a template looks at each
MAX_MESSAGES = 2048

_NO_TOOLS = (
    "octavo renders no tools and parses no calls: describe them in a message, and ask for JSON by response_format"
)
_NO_SCHEMA = "give response_format of the type json_schema; choices are {'enum': [...]}"
# fields that are not honoured -> what to do instead; the advice to LLM's users, but for what they call otherwise
ADVICE: dict[str, str] = {
    **{name: entry.advice for name, entry in (GENERATE_NAMES | CHAT_NAMES | SAMPLING_NAMES).items() if not entry.ours},
    **dict.fromkeys(("tools", "tool_choice", "tool_calls", "tool_call_id", "functions", "function_call"), _NO_TOOLS),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _NO_SCHEMA),
    **dict.fromkeys(("structured_outputs", "structural_tag", "guided_decoding_backend"), _NO_SCHEMA),
    **dict.fromkeys(
        ("best_of", "use_beam_search", "length_penalty"), "there is no beam search: ask for n answers with logprobs"
    ),
    "logits_processors": "give logit_bias or response_format",
    "echo": "a chat echoes no prompt; /v1/completions does",
    "suffix": "there is no text to fill in before a suffix",
    "prompt_logprobs": "give echo and logprobs to /v1/completions",
    "skip_special_tokens": "texts never have special tokens; return_token_ids gives their ids",
    "include_stop_str_in_output": "a stop string is in the choice's stop_reason; add it to the text",
    "chat_template": "start the server with --chat-template",
    "continue_final_message": "render the text yourself and send it to /v1/completions",
    "detokenize": "an answer has its text; return_token_ids adds the ids",
    "cache_salt": "start the server with --no-enable-prefix-caching, or one server for each that must not share",
    "thinking_token_budget": "give max_tokens",
}

logger = logging.getLogger(__name__)
_noted: set[str] = set()


class Body(BaseModel):
    """Strict: no unknown fields, no numbers in strings, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # fields that are not honoured -> the values that ask for nothing, which clients like to send
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}
    # fields that change no answer here, whatever their values; the log says once that one came
    HARMLESS: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = {*cls.model_fields, *cls.NEUTRAL}
        for name in cls.HARMLESS:
            if name in fields:
                note_harmless(name)
        return {
            name: value
            for name, value in fields.items()
            if not (value is None and name in known)
            and not _is_one_of(value, cls.NEUTRAL.get(name, ()))
            and name not in cls.HARMLESS
        }


def note_harmless(name: str) -> None:
    """Log, once a field, that a client sent it."""
    if name not in _noted:
        _noted.add(name)
        logger.info("a client sends the field %s: it is taken, and changes nothing here", name)


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in neutral)


class StreamOptions(Body):
    """include_usage: a last chunk without choices that counts the tokens."""

    NEUTRAL = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


class JsonSchema(Body):
    """A named schema; name, description and strict are taken and change nothing: the schema is always kept to."""

    json_schema: dict[str, Any] = Field(alias="schema")
    name: str = ""
    description: str = ""
    strict: bool = True


class ResponseFormat(Body):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(Body):
    """What completions and chat completions have in common; SamplingParams checks the ranges."""

    NEUTRAL = {
        "best_of": (1,),
        "suffix": ("",),
        "use_beam_search": (False,),
        "length_penalty": (1.0, 1),
        "skip_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "bad_words": ([],),
        "logits_processors": ([],),
        "priority": (0,),
        "vllm_xargs": ({},),
        "mm_processor_kwargs": ({},),
        **dict.fromkeys(("allowed_token_ids", "structured_outputs", "prompt_logprobs", "kv_transfer_params"), ()),
        **dict.fromkeys(("truncate_prompt_tokens", "cache_salt"), ()),
    }
    HARMLESS: ClassVar[tuple[str, ...]] = (
        "metadata",
        "name",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    )

    model: str | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Integer = -1
    min_p: float = 0.0
    n: Integer = 1
    seed: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: (
        str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    logprobs: Integer | None = None
    echo: bool = False
    add_special_tokens: bool = True


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    # what a client sends back of an answer's message
    NEUTRAL = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "reasoning_content": (),
    }
    HARMLESS = ("name", "metadata")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_dict(self) -> dict[str, str]:
        """The message as a chat template reads it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    NEUTRAL = SamplingFields.NEUTRAL | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        **dict.fromkeys(("echo", "continue_final_message", "add_special_tokens"), (False,)),
        "chat_template": (),
        "documents": ([],),
    }
    HARMLESS = (*SamplingFields.HARMLESS, "parallel_tool_calls", "include_reasoning")

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: Integer | None = None
    logprobs: bool = False
    top_logprobs: Integer | None = None


class TokenizeRequest(Body):
    """POST /tokenize: of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        others = ("add_generation_prompt", "chat_template_kwargs") if self.messages is None else ("add_special_tokens",)
        if given := [name for name in others if getattr(self, name) is not None]:
            raise ValueError(f"{given[0]} does not go with {'prompt' if self.messages is None else 'messages'}")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
