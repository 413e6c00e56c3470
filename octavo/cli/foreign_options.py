"""Options of vllm serve that a command lacks: renamed, taken where they ask for nothing, or refused with advice. And
options of octavo serve that `octavo warm` lacks.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import typer

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.serve.keywords import Foreign

_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_SHORT["-q"] = "--quantization"
# options of vLLM that take no value
_SWITCHES = frozenset(
    (
        *("async_scheduling", "calculate_kv_scales", "disable_cascade_attn", "disable_custom_all_reduce"),
        *("disable_fastapi_docs", "disable_hybrid_kv_cache_manager", "disable_log_requests", "disable_log_stats"),
        *("disable_sliding_window", "disable_uvicorn_access_log", "enable_auto_tool_choice", "enable_chunked_prefill"),
        *("enable_eplb", "enable_expert_parallel", "enable_log_requests", "enable_lora", "enable_prompt_embeds"),
        *("enable_prompt_tokens_details", "enable_sleep_mode", "return_tokens_as_token_ids", "skip_tokenizer_init"),
        *("trust_remote_code", "use_tqdm_on_load", "use_v2_block_manager", "worker_use_ray"),
    )
)


def translate_options(command: click.Command, arguments: Sequence[str], names: "Mapping[str, Foreign]") -> list[str]:
    """A command's arguments with its own options alone; unknown ones stay, for click to refuse.

    Args:
        names: what each option means that the command lacks, by its name in Python.
    Raises:
        ConfigError: an option that nothing here is like, or one option by two names with two values.
    """
    own = {text: option for option in command.params for text in (*option.opts, *option.secondary_opts)}
    taken: list[str] = []
    given: dict[str | None, tuple[str, str]] = {}  # our name of an option -> its name and value, as they came
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*taken, word, *rest]
        typed, equals, value = word.partition("=")
        head = _SHORT.get(typed, typed)
        if head.startswith("--"):
            head = head.replace("_", "-")
        name = head.removeprefix("--").replace("-", "_")
        is_off = name not in names and name.startswith("no_")
        name = name.removeprefix("no_") if is_off else name
        if head in own or not head.startswith("--") or name not in names or (is_off and name not in _SWITCHES):
            taken.append(head + equals + value)
            if head in own:
                if not equals and rest and not getattr(own[head], "is_flag", False):
                    taken.append(value := rest.pop(0))
                _note(command, given, own[head].name, typed, value)
            continue
        if name in _SWITCHES:
            asked: Any = not is_off
        else:
            if not equals and not rest:
                raise ConfigError(f"octavo {command.name}: {head} needs a value")
            value = value if equals else rest.pop(0)
            asked = _parsed(value)
        ours = names[name].ours
        if ours:
            _note(command, given, ours, typed, value)
            taken += [value] if ours == "model" else ["--" + ours.replace("_", "-"), value]
        elif names[name].is_harmless(asked, {}):
            typer.echo(f"{head} is taken and changes nothing here", err=True)
        else:
            got = "" if name in _SWITCHES else f" {value}"
            raise ConfigError(f"octavo {command.name} does not take {head}{got}; {names[name].advice}")
    return taken


def refuse_options_of(whole: click.Command, command: click.Command, arguments: Sequence[str]) -> None:
    """Name every option that a command lacks and the one that it is a part of has.

    Raises:
        ConfigError: there are such options before a `--`.
    """
    own, others = ({text for p in c.params for text in (*p.opts, *p.secondary_opts)} for c in (command, whole))
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    typed = dict.fromkeys(word.partition("=")[0] for word in arguments[:end])
    if refused := [name for name in typed if name in others - own]:
        raise ConfigError(
            f"octavo {command.name} takes only some options of octavo {whole.name} (octavo {command.name} --help lists "
            f"them); leave out {', '.join(refused)}"
        )


def _note(command: click.Command, given: dict[str | None, tuple[str, str]], ours: str, name: str, value: str) -> None:
    """Take note of an option of ours, and refuse another value of it that came by another name."""
    before, other = given.get(ours, (name, value))
    if before != name and other != value:
        text = f"{before} {other} and {name} {value} are one option by two names; give one of them"
        raise ConfigError(f"octavo {command.name}: {text}")
    given[ours] = name, value


def _parsed(text: str) -> Any:
    """An option's value as the keyword of the same name has it."""
    try:
        return json.loads(text)
    except ValueError:
        return text
