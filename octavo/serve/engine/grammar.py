"""Grammars: which tokens keep an output to a JSON schema, by llguidance. The sampler asks, sequences feed."""

import importlib.util
import threading
from collections import OrderedDict
from typing import Any

from octavo.models.tokenizer import Tokenizer
from octavo.serve.sampling_params import ParameterError

# JSON allows blanks and lines without end, with which a model that is unsure would fill all its tokens
WHITESPACE = r"\x0A?\x20{0,16}"  # a line, indented
# compiled schemas that are kept: clients send the same few again and again
MAX_KEPT = 64


class Grammar:
    """The state of one sequence's output.

    Args:
        matcher: llguidance's LLMatcher.
        vocab_size: of the model.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def error(self) -> str | None:
        """Why it can go no further (the library's limits, mostly); its sequence must end then, and no other."""
        return f"json_schema: {self._matcher.get_error()}" if self._matcher.is_error() else None

    def allowed_tokens(self) -> bytes | None:
        """One bit a token, the lowest bit of a byte first: whether it may come next; None after an error."""
        mask: bytes = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else mask[: -(-self._vocab_size // 8)]

    def accept(self, token_id: int) -> None:
        """Take note of the token that was drawn."""
        self._matcher.consume_token(token_id)


class GrammarFactory:
    """Makes grammars for one tokenizer; what that takes is built when it is first wanted. Safe from several threads.

    Args:
        tokenizer: None where there is none: then every schema is refused.
        vocab_size: of the model.
        eos_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._lock = threading.Lock()
        self._matchers: OrderedDict[str, Any] = OrderedDict()  # at their beginning; the one used last comes last
        self._vocabulary: Any = None

    def check(self, schema: str) -> None:
        """Refuse a schema that no grammar can be made of.

        Raises:
            ParameterError: what is missing (library, tokenizer, end-of-sequence token) or wrong with the schema.
        """
        self.make(schema)

    def make(self, schema: str) -> Grammar:
        """A grammar at its beginning; schema is JSON text. Raises: see check."""
        with self._lock:
            if schema in self._matchers:
                self._matchers.move_to_end(schema)
            else:
                self._matchers[schema] = self._compile(schema)
            if len(self._matchers) > MAX_KEPT:
                self._matchers.popitem(last=False)
            return Grammar(self._matchers[schema].deep_copy(), self._vocab_size)

    def _compile(self, schema: str) -> Any:
        vocabulary = self._build_vocabulary()
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
            matcher = LLMatcher(vocabulary, grammar, log_level=0)
        except ValueError as error:
            raise ParameterError("json_schema", f"cannot be kept to: {error}") from None
        if matcher.is_error():
            raise ParameterError("json_schema", f"cannot be kept to: {matcher.get_error()}")
        return matcher

    def _build_vocabulary(self) -> Any:
        """llguidance's view of the tokenizer."""
        if self._tokenizer is None or not self._eos_ids:
            raise ParameterError("json_schema", "needs a tokenizer and an end-of-sequence token, which are not there")
        if importlib.util.find_spec("llguidance") is None:
            raise ParameterError("json_schema", "needs the library llguidance; pip install 'octavo[serve]'")
        from llguidance import LLTokenizer

        if self._vocabulary is None:
            try:
                self._vocabulary = LLTokenizer(
                    self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids)
                )
            except Exception as error:  # the library has no narrower type
                raise ParameterError("json_schema", f"cannot be kept to with this tokenizer: {error}") from None
        return self._vocabulary
