"""DecodeGraphs and MixedGraphs on a CPU: what is captured computes at each replay; no test file."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from octavo.serve.engine.decode_graphs import DecodeGraphs, StepGraph, drawing_group
from octavo.serve.engine.mixed_graphs import MixedGraphs, MixedStep, mixed_sizes
from octavo.serve.engine.mixed_inputs import empty_vector
from octavo.serve.engine.model_runner import ModelRunner


class Now:
    """Stands for a CUDA graph: its replay computes."""

    def __init__(self, run: Any) -> None:
        self.replay = run


class EagerGraphs(DecodeGraphs):
    """The same steps, tried out once as a capture does.

    Args:
        runner: that uses them.
        batch_sizes: of the graphs.

    Attributes:
        num_dealt: steps of which each rank draws for a share of the rows.
    """

    def __init__(self, runner: ModelRunner, batch_sizes: list[int], max_model_len: int) -> None:
        self.model, self.slots, self.layers, self.choices = runner.model, runner.slots, runner.layers, None
        self.batch_sizes, self.max_model_len = batch_sizes, max_model_len
        self.addresses, self.obstacle, self._captured = [], None, {}
        self._num_covered = Counter()
        self.num_dealt = 0

    def find(self, num_rows: int, longest: int) -> StepGraph | None:
        graph = super().find(num_rows, longest)
        self.num_dealt += graph is not None and graph.group is not None
        return graph

    def forward(self, graph: StepGraph, seq_lens: Sequence[int], slots: Sequence[int]) -> None:
        missing = graph.inputs.shape[1] - len(slots)
        rows = [[*seq_lens, *[0] * missing], [*slots, *[self.slots.num_slots] * missing]]
        graph.inputs.copy_(torch.tensor(rows, dtype=torch.int32))
        graph.forward.replay()

    def clear(self) -> None:
        self._captured.clear()

    def _capture(self, key: tuple[int, int]) -> StepGraph:
        size, bound = key
        inputs = torch.zeros(2, size, dtype=torch.int32)
        inputs[1] = self.slots.num_slots
        logits = self._logits(inputs, bound).clone()
        tokens = self._draw(inputs, logits).clone()
        forward: Any = Now(lambda: logits.copy_(self._logits(inputs, bound)))
        draw: Any = Now(lambda: tokens.copy_(self._draw(inputs, logits)))
        return StepGraph(inputs, forward, draw, logits, tokens, drawing_group(self.model, size))


class EagerMixedGraphs(MixedGraphs):
    """The same steps with prompts.

    Args:
        runner: that uses them.
        max_tokens: of a step.
        max_len: of a sequence.

    Attributes:
        num_replayed: steps.
    """

    def __init__(self, runner: ModelRunner, max_tokens: int, max_len: int, split_sizes: tuple[int, ...] = (8,)) -> None:
        self.model, self.slots, self.layers, self.choices = runner.model, runner.slots, runner.layers, runner.choices
        self.sizes, self.max_len, self.split_sizes = mixed_sizes(runner.model, max_tokens), max_len, [*split_sizes]
        self.addresses, self.obstacle, self._captured, self._seen = [], None, {}, set()
        self._num_covered = Counter()
        heads, kv_heads = runner.model.num_local_heads
        self._group, self._known_rows, self._attended = heads // kv_heads, 0, None
        self.num_replayed = 0

    def clear(self) -> None:
        self._captured.clear()

    def _capture(self, key: tuple[int, int]) -> MixedStep:
        shape = self._shape(key)
        vector = empty_vector(shape, pinned=False)
        hidden = self._forward(vector, shape).clone()

        def replay() -> None:
            self.num_replayed += 1
            hidden.copy_(self._forward(vector, shape))

        graph: Any = Now(replay)
        return MixedStep(shape, vector, graph, hidden)
