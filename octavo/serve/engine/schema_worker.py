"""Compiling a JSON schema with llguidance; as a script, the worker process in which a server tries schemas (ADR 18).

It imports nothing of octavo, and so no torch: a worker starts in a tenth of a second, and its vocabulary in about one.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
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
# a worker that holds so much more address space than at its start is replaced: the next schema shall find all of it
MAX_LEFT_BYTES = 64 << 20
NICENESS = 10  # the engine and its requests come first
_PR_SET_PDEATHSIG = 1


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


def main() -> None:
    """Read the setup, then schemas, each a line of JSON; answer each with {"error", "num_bytes", "is_last"}."""
    _restrict()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    setup = json.loads(line)
    try:
        vocabulary = build_vocabulary(setup["tokenizer"], setup["vocab_size"], setup["eos_ids"])
        _limit_memory(setup["max_memory_bytes"])
    except BaseException as error:  # a panic of the library is no Exception
        _answer(error=one_line(f"{type(error).__name__}: {error}"))
        return
    del line
    threading.stack_size(TRIAL_STACK_BYTES)
    least, _ = _memory()
    _answer()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, setup["timeout_s"])
        answer: dict[str, Any] = {}
        thread = threading.Thread(target=_try, args=(vocabulary, json.loads(line), answer))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_last = _memory()[0] > least + MAX_LEFT_BYTES
        _answer(**answer, is_last=is_last)
        if is_last:
            return


def _try(vocabulary: Any, schema: str, answer: dict[str, Any]) -> None:
    _, before = _memory()
    try:
        matcher = compile_schema(vocabulary, schema)
        answer["num_bytes"] = max(0, _memory()[1] - before)
        del matcher
    except BaseException as error:
        answer["error"] = str(error) if isinstance(error, ValueError) else one_line(f"{type(error).__name__}: {error}")


def _restrict() -> None:
    """Die with the parent, at the alarm, and without a dump of the memory; give way to other processes."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if sys.platform == "linux":  # on other systems a worker ends with its standard input, or at the alarm
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)


def _limit_memory(max_bytes: int) -> None:
    """Bound the address space; behind the vocabulary, whose making takes several times what it leaves."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _memory() -> tuple[int, int]:
    """Bytes of address space, and of memory; zeros on systems that do not say."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        pages = file.read().split()
        return int(pages[0]) * os.sysconf("SC_PAGE_SIZE"), int(pages[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0, 0


def _answer(error: str | None = None, num_bytes: int = 0, is_last: bool = False) -> None:
    fields = {"error": error, "num_bytes": num_bytes, "is_last": is_last}
    sys.stdout.buffer.write(json.dumps(fields).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
