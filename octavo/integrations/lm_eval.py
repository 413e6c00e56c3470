"""lm-evaluation-harness over an LLM: its tasks run in this process, through the engine that serves.

The harness is the optional extra `eval`; it is imported only when tasks are run.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import BackendError, ConfigError, RequestError, install_extra
from octavo.models.tokenizer import Tokenizer
from octavo.serve.llm import LLM
from octavo.serve.sampling_params import SamplingParams

# the generation options that the harness and octavo call alike
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_DEFAULT_MAX_TOKENS = 256
_BOOTSTRAP_ITERS = 1000
Pair = tuple[list[int], list[int]]


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """One metric of one task.

    Attributes:
        task: its name.
        metric: its name, with the filter's behind a comma where there is one.
        value: as the harness computes it.
        stderr: its standard error, None where the harness has none.
    """

    task: str
    metric: str
    value: float
    stderr: float | None


def run_tasks(
    llm: LLM,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    task_dir: str | Path | None = None,
    apply_chat_template: bool = False,
) -> list[TaskScore]:
    """Run tasks of the harness; most of their data sets are downloaded by it.

    Args:
        tasks: names of tasks or groups.
        limit: documents a task, at most.
        num_fewshot: examples before each document; None for the task's own.
        task_dir: a directory of YAML files with tasks of your own.
    Returns:
        Every metric, in the harness's order.
    Raises:
        BackendError: the harness is not installed.
        ConfigError: an unknown task, no task, or no tokenizer.
        RequestError: a text longer than the model's context, or a generation option that octavo does not have.
    """
    require_harness()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_dir is None else str(task_dir), include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):  # the harness reads thousands of files for its own
        manager = TaskManager(include_path=None if task_dir is None else str(task_dir))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown or not tasks:
        raise ConfigError(f"the harness has no task {', '.join(unknown) or 'to run'}; `lm_eval ls tasks` lists them")
    try:
        results = simple_evaluate(
            model=make_lm(llm),
            tasks=list(tasks),
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=manager,
            apply_chat_template=apply_chat_template,
            bootstrap_iters=_BOOTSTRAP_ITERS,
            log_samples=False,
        )
    except OSError as error:  # what clients of the hub raise without a network
        raise ConfigError(
            f"the data of {', '.join(tasks)} could not be read: the harness downloads it; give --task-dir with tasks "
            f"over local files, or a network ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        ) from error
    return [score for task, values in results["results"].items() for score in _scores(task, values)]


def require_harness() -> None:
    """Raise a BackendError unless lm-evaluation-harness is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise BackendError(f"running tasks needs lm-evaluation-harness; {install_extra('eval')}")


def make_lm(llm: LLM) -> Any:
    """An LLM as the harness's LM, for lm_eval.simple_evaluate.

    Raises:
        BackendError: the harness is not installed.
        ConfigError: the LLM has no tokenizer.
    """
    require_harness()
    from lm_eval.api.model import LM

    class OctavoLM(HarnessRequests, LM):  # type: ignore[misc]
        """The harness's interface; what it asks is answered by HarnessRequests."""

        def __init__(self) -> None:
            LM.__init__(self)
            HarnessRequests.__init__(self, llm)

    return OctavoLM()


class HarnessRequests:
    """Answers the harness's three kinds of requests; a request's `args` hold its texts.

    Args:
        llm: with a tokenizer. Texts are tokenized as LLM.generate does it, BOS token included.
    """

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise ConfigError("tasks are texts, and this LLM has no tokenizer; put a tokenizer.json beside the weights")
        self._llm, self._tokenizer = llm, llm.tokenizer

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding gives it) of each (context, continuation)."""
        return self._score([self._encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each text, every token predicted once; long ones in windows of the model's context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs: list[list[Pair]] = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self._tokenizer.encode(request.args[0]),
                prefix_token=_prefix_id(self._tokenizer),
                max_seq_len=self._llm.engine.max_model_len - 2,
                context_len=1,
            )
            pairs.append([make_disjoint_window(window) for window in windows])
        scores = iter(self._score([pair for windows in pairs for pair in windows]))
        return [sum(next(scores)[0] for _ in windows) for windows in pairs]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The text behind each (context, options), up to the first of options["until"]."""
        params = [_sampling_params(request.args[1]) for request in requests]
        prompts = []
        for request, p in zip(requests, params, strict=True):
            assert p.max_tokens is not None, "set by _sampling_params"
            num_kept = self._llm.engine.max_model_len - p.max_tokens
            if num_kept < 1:
                raise RequestError(
                    f"max_gen_toks={p.max_tokens} leaves no room for a prompt in {self._llm.engine.max_model_len} "
                    "tokens; raise max_model_len"
                )
            prompts.append(self._encode(request.args[0])[-num_kept:])
        return [output.outputs[0].text for output in self._llm.generate(prompts, params)] if prompts else []

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        return self._tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the harness's records."""
        return self._tokenizer.chat_template

    @property
    def tokenizer_name(self) -> str:
        """What the harness's caches of requests are named after."""
        return f"octavo-{self._tokenizer.vocab_size}"

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Score each (context ids, continuation ids); a context that is too long loses its beginning."""
        longest = self._llm.engine.max_model_len - 1  # the engine makes one token more
        for _, continuation in pairs:
            if len(continuation) >= longest:
                raise RequestError(
                    f"a continuation of {len(continuation)} tokens does not fit into the {longest} that the engine "
                    "scores at once; raise max_model_len"
                )
        prompts = [(context + continuation)[-longest:] for context, continuation in pairs]
        if not prompts:
            return []
        outputs = self._llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
        found = []
        for output, (_, continuation) in zip(outputs, pairs, strict=True):
            assert output.prompt_logprobs is not None, "asked for"
            scored = output.prompt_logprobs[len(output.prompt_logprobs) - len(continuation) :]
            own = [row[token] for row, token in zip(scored, continuation, strict=True) if row is not None]
            found.append((sum(entry.logprob for entry in own), all(entry.rank == 1 for entry in own)))
        return found

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """Token ids of both, cut from those of the whole text; spaces at the context's end go to the continuation."""
        if not context:
            return [_prefix_id(self._tokenizer)], self._tokenizer.encode(continuation)
        stripped = context.rstrip()
        if stripped:
            continuation, context = context[len(stripped) :] + continuation, stripped
        head, whole = self._encode(context), self._encode(context + continuation)
        return whole[: len(head)], whole[len(head) :]

    def _encode(self, text: str) -> list[int]:
        """As LLM.generate does it; a chat template has written the BOS token already."""
        bos = self._tokenizer.bos_token
        return self._tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos))


def _prefix_id(tokenizer: Tokenizer) -> int:
    """What stands before the first token of a text: BOS, else the end-of-sequence token."""
    bos_id = None if tokenizer.bos_token is None else tokenizer.backend.token_to_id(tokenizer.bos_token)
    prefix = tokenizer.eos_id if bos_id is None else bos_id
    if prefix is None:
        raise ConfigError("scoring a text from its first token needs a BOS or end-of-sequence token; there is neither")
    return int(prefix)


def _sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """The harness's generation options; greedy unless do_sample or a temperature says otherwise."""
    rest = dict(options)
    until = rest.pop("until", None)
    max_tokens = rest.pop("max_gen_toks", _DEFAULT_MAX_TOKENS)
    samples = rest.pop("do_sample", rest.get("temperature", 0.0) > 0.0)
    unknown = sorted(set(rest) - set(_OPTIONS))
    if unknown:
        raise RequestError(f"generation options {', '.join(unknown)} are not known; known: {', '.join(_OPTIONS)}")
    rest["temperature"] = rest.get("temperature", 1.0) if samples else 0.0
    stop = [until] if isinstance(until, str) else until
    return SamplingParams(max_tokens=max_tokens, stop=[text for text in stop or () if text] or None, **rest)


def _scores(task: str, values: Mapping[str, Any]) -> list[TaskScore]:
    """Metrics among a task's results, whose keys are `metric,filter` and `metric_stderr,filter`."""
    found = []
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else key
        found.append(TaskScore(task, name, float(value), float(stderr) if isinstance(stderr, int | float) else None))
    return found
