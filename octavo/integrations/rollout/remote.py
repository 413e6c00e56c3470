"""What the engines behind HTTP have in common: a tokenizer of our own, the committed version, and distrust."""

import dataclasses
import math
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from octavo.integrations.rollout.http import HttpClient, RefusedError
from octavo.models import ModelConfig
from octavo.models.tokenizer import Tokenizer
from octavo.rl.engines.config import EngineSection
from octavo.rl.engines.protocol import Completion, Generation, Prompt, RolloutEngine, SamplingSpec, check_completion
from octavo.weights.errors import EngineAnswerError, EngineError, StaleVersionError
from octavo.weights.wire import field, read_tensor


class RemoteEngine(RolloutEngine):
    """Base of the engines behind HTTP.

    Args:
        section: where the server is.
        tokenizer: the policy's.
        config: the policy's.

    Attributes:
        version: that was committed last, in the trainer's count; None before the first update.
        broken: why the server's weights cannot be trusted; None where they can.
    """

    name = "remote"
    is_remote = True
    num_requests: int | None = None
    # a GET that costs the server nothing, a field of its answer, and what a server that answers otherwise needs
    probe_path, probe_field, probe_remedy = "", "", ""

    def __init__(self, section: EngineSection, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self.section, self._tokenizer, self._config = section, tokenizer, config
        self.client = HttpClient(self.name, section.url, key=section.api_key, timeout_s=section.update_timeout_s)
        self.version: int | None = None
        self.broken: str | None = None
        self._run = secrets.token_hex(4)

    @classmethod
    def check_reachable(cls, section: EngineSection) -> None:
        """Ask the server for its cheapest answer.

        Args:
            section: with its keys.
        Raises:
            EngineError: none came, or one that is not this engine's.
        """
        client = HttpClient(cls.name, section.url, key=section.api_key, timeout_s=section.update_timeout_s)
        try:
            field(client.get(cls.probe_path), cls.probe_field)
        except (RefusedError, EngineAnswerError) as error:
            raise EngineError(
                f"{cls.name}: {section.url} does not answer as this engine does when it is ready ({error}); "
                f"{cls.probe_remedy}, or fix engine.name and engine.url"
            ) from error

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        return self._config.max_position_embeddings

    def generate(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> list[Generation]:
        """See RolloutEngine."""
        self._check_ready()
        ids = [self.tokenizer.encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in prompts]
        found: dict[int, Generation] = {}
        for max_tokens, places in self._by_room(ids, spec.max_tokens).items():
            some = [ids[i] for i in places]
            samples = self._checked(some, dataclasses.replace(spec, max_tokens=max_tokens))
            found |= {i: Generation(ids[i], each) for i, each in zip(places, samples, strict=True)}
        return [found[i] for i in range(len(ids))]

    def _by_room(self, ids: list[list[int]], max_tokens: int) -> dict[int, list[int]]:
        """Most tokens -> places of the prompts that leave room for them: a server refuses more than its context."""
        found: dict[int, list[int]] = {}
        for i, prompt in enumerate(ids):
            room = self.max_model_len - len(prompt)
            found.setdefault(min(max_tokens, room) if room > 0 else max_tokens, []).append(i)
        return found

    def _checked(self, ids: list[list[int]], spec: SamplingSpec) -> list[list[Completion]]:
        """The samples of each prompt."""
        completions = self._complete(ids, spec)
        wanted = len(ids) * spec.samples_per_prompt
        if len(completions) != wanted:
            raise EngineAnswerError(f"{self.name}: {len(completions)} completions came, of {wanted} asked for")
        for completion in completions:
            check_completion(completion, spec, self._config.vocab_size, self.name)
        size = spec.samples_per_prompt
        return [completions[i * size : (i + 1) * size] for i in range(len(ids))]

    @abstractmethod
    def _complete(self, ids: list[list[int]], spec: SamplingSpec) -> list[Completion]:
        """All samples, those of one prompt after each other."""

    def _check_ready(self) -> None:
        if self.broken is not None:
            raise EngineError(
                f"{self.name}: its weights cannot be trusted since an update failed ({self.broken}); hand over weights "
                "again, or restart it"
            )
        if self.version is None:
            raise EngineError(f"{self.name}: no weights were handed over yet; refit comes before the first batch")

    def _committed(self) -> int:
        assert self.version is not None, "generate has checked it"
        return self.version

    def _label(self, version: int) -> str:
        """What the server calls a version: no other run's, and no restarted server's."""
        return f"octavo-{self._run}-{version}"

    def _check_label(self, label: object, version: int, when: str) -> None:
        if label != self._label(version):
            raise StaleVersionError(
                f"{self.name}: {when} it holds weights {label!r}, and {self._label(version)!r} were committed: it was "
                "restarted, updated by another client, or did not take the update"
            )


def read_choices(answer: Any, versions: dict[int, int] | int, *, with_routed_experts: bool = False) -> list[Completion]:
    """The choices of /v1/completions, with token ids, sorted by their index.

    Args:
        versions: of every token; or the server's versions -> the trainer's, where each choice has weight_versions.
        with_routed_experts: each choice has them, as octavo's server writes them.
    Raises:
        EngineAnswerError: something is missing.
        StaleVersionError: a token of a version that versions lacks.
    """
    found = []
    for choice in sorted(field(answer, "choices"), key=lambda c: field(c, "index")):
        token_ids, experts = field(choice, "token_ids"), None
        if with_routed_experts:
            where = f"the experts of choice {choice.get('index')}"
            experts = read_tensor(field(choice, "routed_experts"), (torch.uint8, torch.int16), where)
        found.append(
            Completion(
                field(choice, "text"),
                list(token_ids),
                [math.nan if value is None else float(value) for value in field(choice, "logprobs", "token_logprobs")],
                [versions] * len(token_ids) if isinstance(versions, int) else _translate(choice, versions),
                field(choice, "finish_reason"),
                choice.get("stop_reason"),
                experts,
            )
        )
    return found


def _translate(choice: Any, versions: dict[int, int]) -> list[int]:
    theirs = field(choice, "weight_versions")
    if strange := {version for version in theirs if version not in versions}:
        raise StaleVersionError(
            f"tokens were sampled from the server's weight version {min(strange)}, and {max(versions)} was committed: "
            "the server was restarted, was updated by another client, or answers with old weights"
        )
    return [versions[version] for version in theirs]
