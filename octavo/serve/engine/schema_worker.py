"""Compiling a JSON schema with llguidance; also the program of the worker processes that try schemas (ADR 18).

It imports nothing of octavo, and so no torch: the program starts in a tenth of a second, its vocabulary in about one.
"""

import contextlib
import os
import threading
from typing import Any

# JSON allows blanks and lines without end, with which a model that is unsure would fill all its tokens
WHITESPACE = r"\x0A?\x20{0,16}"  # a line, indented
# of a grammar's automaton, which grows with what is written and is kept with its schema: half a kB each, so 50 MB at
# most; the library's 250,000 are more than 64 kept schemas should take
MAX_LEXER_STATES = 100_000
MOST_SHOWN = 300  # characters of an error: the library quotes patterns whole
# a schema that nests deep overflows the stack, which ends a process: here it meets an eighth of what threads have
TRIAL_STACK_BYTES = 1 << 20

_vocabulary: Any = None  # of the worker processes' program


def build_vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: list[int]) -> Any:
    """llguidance's view of a tokenizer (an LLTokenizer); tokenizer_json is the text of a tokenizer.json."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_ids)


def compile_schema(vocabulary: Any, schema: str) -> Any:
    """A schema's LLMatcher at its beginning.

    Raises:
        ValueError: no grammar can be made of it; one line.
    """
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise ValueError(one_line(str(error))) from None
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one finds what leads nowhere
    if matcher.is_error():
        if matcher.get_error().startswith("NoExtension"):
            raise ValueError("no JSON fits it: a $ref leads back to itself, or its parts exclude each other")
        raise ValueError(one_line(matcher.get_error()))
    return matcher


def one_line(error: str) -> str:
    """The library's error without the dump of its state, and cut where it is long."""
    text = " ".join(error.partition("<state>")[0].split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def prepare(setup: dict[str, Any]) -> int:
    """Build the vocabulary, before the first fork; the address space that a worker may have."""
    global _vocabulary
    _vocabulary = build_vocabulary(setup["tokenizer"], setup["vocab_size"], setup["eos_ids"])
    threading.stack_size(TRIAL_STACK_BYTES)
    max_memory_bytes: int = setup["max_memory_bytes"]
    return max_memory_bytes


def try_schema(schema: str) -> tuple[int, str | None]:
    """Compile a schema: bytes of memory that it takes, and what is wrong with it; for a worker process."""
    found: list[tuple[int, str | None]] = []

    def work() -> None:
        before = _resident_bytes()
        try:
            matcher = compile_schema(_vocabulary, schema)
            found.append((max(0, _resident_bytes() - before), None))
            del matcher
        except BaseException as error:  # a panic of the library is no Exception
            text = str(error) if isinstance(error, ValueError) else one_line(f"{type(error).__name__}: {error}")
            found.append((0, text))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def _resident_bytes() -> int:
    """Bytes of memory of this process; 0 on systems that do not say."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
