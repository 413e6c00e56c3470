"""Grammars: which tokens keep an output to a JSON schema, by llguidance. The sampler asks, sequences feed."""

import importlib.util
import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakValueDictionary

from octavo.errors import install_extra
from octavo.models.tokenizer import Tokenizer
from octavo.serve.engine.schema_worker import build_vocabulary, compile_schema, one_line
from octavo.serve.sampling_params import ParameterError

# compiled schemas that are kept: clients send the same few again and again
MAX_KEPT = 64
# of all compiled schemas, kept or in use. A usual one has less than 1 MiB; there are some of 2 kB of text with 500 MiB
MAX_COMPILED_BYTES = 1 << 30
_LEAST_BYTES = 64 << 10  # where less was measured


class CompiledSchema:
    """A schema that was compiled; while it is held it is not compiled again.

    Args:
        matcher: llguidance's LLMatcher at its beginning.
        num_bytes: memory that it takes, as far as that is known.

    Attributes:
        is_spent: one of its grammars met a limit of the library, which all that come would meet too.
    """

    def __init__(self, matcher: Any, num_bytes: int = 0) -> None:
        self.matcher, self.num_bytes = matcher, max(num_bytes, _LEAST_BYTES)
        self.is_spent = False


class Grammar:
    """The state of one sequence's output.

    Args:
        compiled: the schema that it must keep to.
        vocab_size: of the model.
    """

    def __init__(self, compiled: CompiledSchema, vocab_size: int) -> None:
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._vocab_size = vocab_size

    @property
    def error(self) -> str | None:
        """Why it can go no further (the library's limits, mostly); its sequence must end then, and no other."""
        return f"json_schema: {one_line(self._matcher.get_error())}" if self._has_failed() else None

    def allowed_tokens(self) -> bytes | None:
        """One bit a token, the lowest bit of a byte first: whether it may come next; None after an error."""
        mask: bytes = self._matcher.compute_bitmask()
        return None if self._has_failed() else mask[: -(-self._vocab_size // 8)]

    def accept(self, token_id: int) -> None:
        """Take note of the token that was drawn."""
        self._matcher.consume_token(token_id)

    def _has_failed(self) -> bool:
        self._compiled.is_spent |= self._matcher.is_error()
        return bool(self._matcher.is_error())


class GrammarFactory:
    """Makes grammars for one tokenizer; what that takes is built when it is first wanted. Safe from several threads.

    A schema is compiled in the thread that asks, and no other request waits for it. A server, which
    takes schemas from strangers, has tried them before and holds the CompiledSchema until its request is admitted.

    Args:
        tokenizer: None where there is none: then every schema is refused.
        vocab_size: of the model.
        eos_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._lock = threading.Lock()  # over the two below; nothing is compiled under it
        self._kept: OrderedDict[str, CompiledSchema] = OrderedDict()  # the one used last comes last
        self._live: WeakValueDictionary[str, CompiledSchema] = WeakValueDictionary()  # those and what requests hold
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Any = None

    def make(self, schema: str) -> Grammar:
        """A grammar at its beginning; schema is JSON text. Errors as compile."""
        return Grammar(self.compile(schema), self._vocab_size)

    def find(self, schema: str) -> CompiledSchema | None:
        """The schema if it was compiled before; waits for nothing."""
        with self._lock:
            compiled = self._live.get(schema)
            if compiled is None or compiled.is_spent:
                return None
            self._keep(schema, compiled)
            return compiled

    def compile(self, schema: str, num_bytes: int = 0) -> CompiledSchema:
        """Find a schema, or compile it here and now.

        Args:
            num_bytes: memory that it takes, if it was tried.
        Raises:
            ParameterError: what is missing (library, tokenizer, end-of-sequence token) or wrong with the schema.
        """
        compiled = self.find(schema)
        if compiled is not None:
            return compiled
        vocabulary = self._build_vocabulary()
        try:
            compiled = CompiledSchema(compile_schema(vocabulary, schema), num_bytes)
        except ValueError as error:
            raise ParameterError("json_schema", f"cannot be kept to: {error}") from None
        with self._lock:
            self._live[schema] = compiled
            self._keep(schema, compiled)
        return compiled

    def has_room(self, num_bytes: int) -> bool:
        """Whether another schema of that size may be compiled; unused schemas make way for it."""
        with self._lock:
            most = MAX_COMPILED_BYTES - num_bytes
            while self._kept and self._num_bytes() > most:
                self._kept.popitem(last=False)
            return self._num_bytes() <= most

    def worker_setup(self) -> dict[str, Any]:
        """What a worker process builds its vocabulary of, once this process has been able to.

        Raises:
            ParameterError: what is missing, as in compile.
        """
        self._build_vocabulary()
        assert self._tokenizer is not None, "it was asked for its vocabulary"
        tokenizer = self._tokenizer.backend.to_str()
        return {"tokenizer": tokenizer, "vocab_size": self._vocab_size, "eos_ids": sorted(self._eos_ids)}

    def _keep(self, schema: str, compiled: CompiledSchema) -> None:
        self._kept[schema] = compiled
        self._kept.move_to_end(schema)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._live.values())

    def _build_vocabulary(self) -> Any:
        """llguidance's view of the tokenizer."""
        if self._tokenizer is None or not self._eos_ids:
            raise ParameterError("json_schema", "needs a tokenizer and an end-of-sequence token, which are not there")
        if importlib.util.find_spec("llguidance") is None:
            raise ParameterError("json_schema", f"needs the library llguidance; {install_extra('serve')}")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = build_vocabulary(
                        self._tokenizer.backend.to_str(), self._vocab_size, sorted(self._eos_ids)
                    )
                except Exception as error:  # the library has no narrower type
                    text = f"cannot be kept to with this tokenizer: {one_line(str(error))}"
                    raise ParameterError("json_schema", text) from None
            return self._vocabulary
