"""Where the answer is in a long text, and whether it is the right one: exact, by math-verify, or by any callable."""

import functools
import importlib
import importlib.util
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.errors import BackendError, ConfigError, DataError, did_you_mean

# reward of (prompt, completion, answer, the file's whole row)
Verifier = Callable[[str, str, str, Mapping[str, Any]], float]

MATH_TIMEOUT = 5  # seconds, of each reading and each comparison
_VERL_NEEDED = {"solution_str", "ground_truth"}  # of a function that takes the others as **kwargs
_VERL_ARGUMENTS = {"data_source", *_VERL_NEEDED, "extra_info"}
_AFTER = ("####", "answer:")  # GSM8K's and DAPO's words before the final answer


def load_callable(target: str) -> Callable[..., Any]:
    """What `module:function` or `file.py:function` names.

    Raises:
        ConfigError: not of that form, no such module or file, or no such function in it.
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"a callable is named as module:function or file.py:function, got {target!r}")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{target!r}: {error}; give the name of a module on the Python path, or a file") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{target!r}: {module_name} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def make_verifier(name: str, options: Mapping[str, Any] | None = None) -> Verifier:
    """The verifier that a config names.

    Args:
        name: "exact" (the final answer's text equals the right one's), "math" (they are equal in math-verify's eyes),
            or a callable. It is called as function(prompt, completion, answer), or, where it has verl's arguments
            (data_source, solution_str, ground_truth, extra_info; or **kwargs for some), with those; it gives a number,
            or verl's dict with "score".
        options: further keyword arguments of a callable.
    Raises:
        BackendError: "math" without math-verify.
        ConfigError: another word, no such callable, options that it does not take.
    """
    if options and ":" not in name:
        raise ConfigError(f"task.verifier_options are a function's, and task.verifier is {name!r}; leave them out")
    if name == "exact":
        return lambda _, completion, answer, row: float(final_answer(completion) == _bare(answer))
    if name == "math":
        if importlib.util.find_spec("math_verify") is None:
            raise BackendError(
                "task.verifier = 'math' needs math-verify; pip install math-verify, or set task.verifier = 'exact' "
                "where answers are plain text"
            )
        return lambda _, completion, answer, row: verify_math(completion, answer)
    if ":" not in name:
        hint = did_you_mean(name, ("math", "exact"))
        raise ConfigError(f"task.verifier must be 'math', 'exact' or module:function, got {name!r}{hint}")
    function = _with_options(name, options or {})
    parameters = inspect.signature(function).parameters.values()
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    if names >= (_VERL_NEEDED if is_open else _VERL_ARGUMENTS):
        return lambda _, completion, answer, row: _number(
            function(
                data_source=row.get("data_source"),
                solution_str=completion,
                ground_truth=answer,
                extra_info=row.get("extra_info"),
            )
        )
    return lambda prompt, completion, answer, row: _number(function(prompt, completion, answer))


def _with_options(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    function = load_callable(name)
    try:
        inspect.signature(function).bind_partial(**options)
    except TypeError as error:
        raise ConfigError(f"task.verifier {name!r} with task.verifier_options {dict(options)}: {error}") from None
    return functools.partial(function, **options)


def verify_math(completion: str, answer: str) -> float:
    """1 where math-verify finds the right answer in a completion, else 0; no answer, or one too slow to read, is 0.

    Raises:
        DataError: math-verify cannot read the right answer.
    """
    library = importlib.import_module("math_verify")
    gold = _parse_gold(answer)
    if not gold:
        raise DataError(f"math-verify cannot read the right answer {answer!r}; use task.verifier = 'exact'")
    timeout = _timeout()
    return float(library.verify(gold, library.parse(completion, parsing_timeout=timeout), timeout_seconds=timeout))


@functools.lru_cache(maxsize=65536)
def _parse_gold(answer: str) -> Any:
    text = answer if "\\boxed" in answer else f"\\boxed{{{answer.strip().strip('$')}}}"
    return importlib.import_module("math_verify").parse(text, parsing_timeout=_timeout())


def _timeout() -> int | None:
    """Its time limit is an alarm signal, which the main thread alone may set."""
    return MATH_TIMEOUT if threading.current_thread() is threading.main_thread() else None


def final_answer(text: str) -> str:
    """The last \\boxed{...}, else what follows the last `####` or `Answer:` on its line, else the whole text; bare."""
    if (boxed := _last_boxed(text)) is not None:
        return _bare(boxed)
    starts = [(text.lower().rfind(word), len(word)) for word in _AFTER]
    start, length = max(starts)
    if start >= 0:
        text = text[start + length :].strip().partition("\n")[0]
    return _bare(text)


def last_tagged(text: str, tag: str) -> str | None:
    """What the last <tag>...</tag> holds; None without one."""
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


def _last_boxed(text: str) -> str | None:
    """The content of the last \\boxed whose braces close."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 7 : i]
    return None


def _bare(answer: str) -> str:
    return answer.strip().removesuffix(".").strip("$").strip()


def _number(result: Any) -> float:
    if isinstance(result, Mapping):
        if "score" not in result:
            raise DataError(f"a verifier that gives a dict puts the reward under 'score', got {sorted(result)}")
        result = result["score"]
    return float(result)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(f"octavo_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
