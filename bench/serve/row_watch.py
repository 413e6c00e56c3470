"""RowWatch: how many rows a model's products are given, in the engine and in the trainer.

A layer with hooks takes another path than one without. So this looks from outside: at the whole model's
calls, its logits, what is scored, the routers' recorders, and the steps of the engine.
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from octavo.models import Decoder, scoring
from octavo.nn.logprob import EXACT_CHUNK_SIZE
from octavo.nn.router_watch import sparse_blocks
from octavo.serve.engine import Engine
from octavo.serve.engine.decode_graphs import StepGraph
from octavo.serve.engine.model_runner import Launched
from octavo.serve.engine.paged_context import PagedContext
from octavo.serve.engine.scheduler import Chunk

_HEAD = "token_logprobs"  # what the trainer's scoring calls it


class WatchedSide:
    """What one side gave the model.

    Attributes:
        rows: of a pass: M of every linear and router.
        head_rows: M of lm_head.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.rows: set[int] = set()
        self.head_rows: set[int] = set()
        self._num_experts = num_experts
        self._most = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def most_expert_rows(self) -> int:
        """The most that one expert got in a pass; 0 without experts. Waits for the device."""
        return int(self._most.item())

    def note_experts(self, experts: torch.Tensor) -> None:
        """experts [T, S] of a pass; the device is not waited for."""
        counts = torch.zeros(self._num_experts, dtype=torch.int64, device=experts.device)
        chosen = experts.flatten()
        counts.index_add_(0, chosen, torch.ones_like(chosen))
        self._most = torch.maximum(self._most, counts.amax())


class RowWatch:
    """Watches a model, within `with`, and its engines that are given to `watch`.

    Attributes:
        engine: what it gave the model; of a graph what it was captured for.
        trainer: what it gave the model.
        sampled: how many sequences a step sampled for.
        num_replays: steps by CUDA graph.
    """

    def __init__(self, model: Decoder) -> None:
        sides = (WatchedSide(model.config.num_experts, model.device) for _ in range(2))
        self.engine, self.trainer = sides
        self.sampled: set[int] = set()
        self.num_replays = 0
        self._model, self._now = model, self.trainer

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_pre_hook(self._note_pass)
        self._logits = self._model.logits
        self._model.logits = self._note_logits  # type: ignore[method-assign]
        self._token_logprobs = getattr(scoring, _HEAD)
        setattr(scoring, _HEAD, self._note_scored)
        for block in sparse_blocks(self._model):
            block.recorder = self._note_experts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        del self._model.logits  # the class has it
        setattr(scoring, _HEAD, self._token_logprobs)
        for block in sparse_blocks(self._model):
            block.recorder = None

    def watch(self, engine: Engine) -> None:
        """Count the engine's replays from here on."""
        runner = engine.model_runner
        runner.launch = functools.partial(self._launch, runner.launch)  # type: ignore[method-assign]
        if runner.graphs is not None:
            runner.graphs.forward = functools.partial(self._replay, runner.graphs.forward)  # type: ignore[method-assign]

    def _note_pass(self, _: object, args: tuple[Any, ...]) -> None:
        token_ids, context = args
        rows = len(token_ids)
        self._now = self.engine if isinstance(context, PagedContext) else self.trainer
        self._now.rows.add(rows)

    def _note_scored(self, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
        """The trainer's scores, in chunks, past the model's logits: of a pass's tokens, or of fewer."""
        rows = hidden.shape[0]
        self.trainer.head_rows |= {min(rows, EXACT_CHUNK_SIZE), rows % EXACT_CHUNK_SIZE or EXACT_CHUNK_SIZE}
        return self._token_logprobs(hidden, *rest, **options)

    def _note_logits(self, hidden: torch.Tensor, *, deals_rows: bool = False) -> torch.Tensor:
        self.engine.head_rows.add(hidden.shape[0])
        return self._logits(hidden, deals_rows=deals_rows)

    def _note_experts(self, experts: torch.Tensor) -> None:
        if not _is_capturing():
            self._now.note_experts(experts)

    def _launch(self, launch: Callable[[list[Chunk]], Launched], chunks: list[Chunk]) -> Launched:
        self.sampled.add(sum(chunk.is_last for chunk in chunks))
        return launch(chunks)

    def _replay(self, forward: Callable[..., None], graph: StepGraph, *rest: Any) -> None:
        self.num_replays += 1
        forward(graph, *rest)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
