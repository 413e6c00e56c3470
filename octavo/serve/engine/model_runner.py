"""The model runner: turns a step's chunks into tensors, runs the model over the paged cache, samples.

launch() leaves the device at work and collect() waits for it, so that a step can be launched before the one before it
is read. A token that the host does not know yet is taken from its sequence's slot.
"""

import contextlib
import logging
import operator
from typing import NamedTuple

import torch

from octavo.models import Decoder
from octavo.ops._runtime.to_device import send
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer
from octavo.ops.sampling import sample
from octavo.serve.engine.config import EngineConfig
from octavo.serve.engine.decode_graphs import DecodeGraphs, StepGraph, captures_steps
from octavo.serve.engine.expert_choices import RoutedExpertsRecorder
from octavo.serve.engine.graph_capture import operand_addresses
from octavo.serve.engine.logit_adjustment import LogitsProcessor, Plan
from octavo.serve.engine.mixed_graphs import MixedGraphs, can_mix
from octavo.serve.engine.paged_context import PagedContext
from octavo.serve.engine.prompt_graphs import PromptGraphs
from octavo.serve.engine.prompt_logprobs import score_prompts
from octavo.serve.engine.prompt_warm_up import plan_decodes, plan_warm_up
from octavo.serve.engine.sampler import Scores, most_logprobs, read, report
from octavo.serve.engine.scheduler import Chunk
from octavo.serve.engine.slots import Slots

logger = logging.getLogger(__name__)

_is_decode = operator.attrgetter("is_decode")  # at every step of every sequence, so without a frame of its own


class Launched(NamedTuple):
    """A step under way.

    Attributes:
        chunks: what it computes.
        rows: the sampler's report, on the host once ready; None where nothing is sampled.
        ready: None on a CPU.
    """

    chunks: list[Chunk]
    rows: torch.Tensor | None
    ready: "torch.cuda.Event | None"


class ModelRunner:
    """Owns the model and the cache's tensors; knows nothing of requests.

    Args:
        model: in eval or train mode alike; its numerics decide the bits.
        layers: the cache, one entry a layer.
        config: the engine's.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, model: Decoder, layers: list[PagedKVLayer], config: EngineConfig, max_model_len: int) -> None:
        self.model, self.layers = model, layers
        self.slots = Slots(config.max_num_seqs, -(-max_model_len // PAGE_SIZE), model.device)
        self.adjustments = LogitsProcessor(config.max_num_seqs, model.config.vocab_size, model.device)
        num_pages = layers[0].k.shape[0]
        self.choices = RoutedExpertsRecorder(model, num_pages) if config.enable_return_routed_experts else None
        self._longest = max_model_len
        most_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
        self.warm_up_steps = plan_warm_up(config.max_num_seqs, most_tokens)
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        if captures_steps(model, config):
            self.graphs = DecodeGraphs(model, self.slots, layers, config.max_num_seqs, max_model_len, self.choices)
            self.prompt_graphs = PromptGraphs(model, layers, most_tokens, self.choices)
            if can_mix(model):
                limits = most_tokens, max_model_len
                self.mixed_graphs = MixedGraphs(model, self.slots, layers, *limits, self.choices)
        else:
            self.warm_up_steps += plan_decodes(config.max_num_seqs)

    # no_grad, not inference_mode: the 8-bit weights made here are the trainer's too
    @torch.no_grad()
    def launch(self, chunks: list[Chunk]) -> Launched:
        """Start a step.

        Args:
            chunks: at least one. Where a sequence has a grammar, all its tokens must be known.
        Returns:
            The step, its chunks in the order in which they are computed: single tokens first.
        """
        is_decode = all(map(_is_decode, chunks))
        if not is_decode:
            chunks = sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)
        sequences = [chunk.sequence for chunk in chunks]
        slots = self.slots.place(sequences)
        self.adjustments.place(sequences, slots)
        rows: torch.Tensor | None
        graph = None
        table = self.model.kv_table
        is_calibrating = table is not None and table.is_calibrating  # which looks at all rows before it writes one
        if self.graphs is not None and not is_calibrating and is_decode:
            graph = self.graphs.find(len(chunks), max([chunk.end for chunk in chunks]))
        if self.graphs is not None and graph is not None:
            self.graphs.forward(graph, [chunk.end for chunk in chunks], slots)
            rows = self._draw(graph, chunks, slots)
        else:
            rows = self._compute(chunks, slots, takes_graphs=not is_calibrating)
        if table is not None:
            table.end_calibration(self.model.weight_version)
            table.num_written += sum([chunk.num_tokens for chunk in chunks])
        return Launched(chunks, *_to_host(rows))

    def collect(self, launched: Launched) -> tuple[list[int], list[Scores]]:
        """A token for each chunk of a step with is_last, in order, and its logprobs; waits for them."""
        if launched.rows is None:
            return [], []
        if launched.ready is not None:
            launched.ready.synchronize()
        return read(launched.rows, [chunk.sequence for chunk in launched.chunks if chunk.is_last])

    @torch.no_grad()
    def prepare_next(self, num_seqs: int, max_len: int, least_seqs: int = 1, *, sparse: bool = False) -> bool:
        """Make one thing ready that steps of so many sequences and tokens need; False where all is ready.

        Args:
            sparse: of CUDA graphs every other size alone.
        """
        table = self.model.kv_table
        if not self.compiles or not self.layers or (table is not None and table.is_calibrating):
            return False
        if self.warm_up_steps and table is None:  # whose scales count what is written
            self._run_warm_up_step()
            return True
        if self.graphs is not None and self.graphs.prepare_next(num_seqs, max_len, least_seqs, sparse=sparse):
            return True
        if self.mixed_graphs is not None and self.mixed_graphs.prepare_next(sparse=sparse):
            return True
        pieces = self.prompt_graphs
        return pieces is not None and pieces.prepare_next(self._no_pieces_up_to(sparse=sparse), sparse=sparse)

    def num_missing_graphs(self, num_seqs: int, max_len: int, *, sparse: bool) -> int:
        """CUDA graphs that prepare_next has still to capture; all pieces of a step with prompts count as one."""
        num_decodes = 0 if self.graphs is None else len(self.graphs.missing(num_seqs, max_len, sparse=sparse))
        num_mixed = 0 if self.mixed_graphs is None else len(self.mixed_graphs.missing(sparse=sparse))
        if self.prompt_graphs is None:
            return num_decodes + num_mixed
        missing = self.prompt_graphs.missing(self._no_pieces_up_to(sparse=sparse), sparse=sparse)
        return num_decodes + num_mixed + len(missing)

    def _no_pieces_up_to(self, *, sparse: bool) -> int:
        """Tokens of steps that are one graph each; their pieces are captured ahead only for sequences too long for one.

        That is not at the start, which is sparse.
        """
        mixed = self.mixed_graphs
        if mixed is None or (self._longest > mixed.max_len and not sparse):
            return 0
        return mixed.most_tokens

    @property
    def compiles(self) -> bool:
        """Whether there is anything to make ready: not on a CPU."""
        return self.graphs is not None or self.model.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def _run_warm_up_step(self) -> None:
        """The next of them; where memory lacks for one, so it does for those that are as large, and not for others."""
        step = self.warm_up_steps.pop()
        try:
            step.run(self.model, self.layers, self.slots, self._longest)
        except torch.OutOfMemoryError as error:
            if self.model.tensor_group is not None:  # the others wait for this rank
                raise
            self.warm_up_steps = [each for each in self.warm_up_steps if each.num_tokens < step.num_tokens]
            text = "no warm-up of steps of %d tokens and more: %s; lower gpu_memory_utilization"
            logger.warning(text, step.num_tokens, str(error).splitlines()[0])

    def release_idle_buffers(self) -> None:
        """Give back the memory that only sequences needed which have no pages any more."""
        self.adjustments.release()

    def drop_cache(self) -> None:
        """Let go of the cache's tensors, and of the graphs that hold their addresses."""
        self.layers.clear()
        if self.choices is not None:
            self.choices.release()
        self.release_idle_buffers()
        self.note_new_addresses()

    def set_cache(self, layers: list[PagedKVLayer]) -> None:
        """Take the cache's tensors again."""
        self.layers.extend(layers)
        if self.choices is not None:
            self.choices.allocate(layers[0].k.shape[0])

    def note_new_addresses(self) -> None:
        """Forget the graphs: weights or cache are not where they were."""
        for graphs in self._all_graphs():
            graphs.clear()

    @torch.no_grad()
    def note_new_weights(self) -> None:
        """Keep the graphs where new weights and their codes are where the old ones were, on all ranks of a cut model.

        These hold the same graphs, so that all of them come here, or none. A graph may send other messages than a step
        without.
        """
        captured = [graphs for graphs in self._all_graphs() if not graphs.is_empty]
        if not captured:
            return

        def has_moved() -> list[bool]:
            addresses = operand_addresses(self.model)
            return [graphs.addresses != addresses for graphs in captured]

        group = self.model.tensor_group
        by_rank = [has_moved()] if group is None else group.together(has_moved)
        for graphs, moved in zip(captured, zip(*by_rank, strict=True), strict=True):
            if any(moved):
                graphs.clear()

    def _all_graphs(self) -> list[DecodeGraphs | MixedGraphs | PromptGraphs]:
        return [graphs for graphs in (self.graphs, self.mixed_graphs, self.prompt_graphs) if graphs is not None]

    def _draw(self, graph: StepGraph, chunks: list[Chunk], slots: list[int]) -> torch.Tensor:
        """The report on one new token for each row of a graph's logits."""
        sequences = [chunk.sequence for chunk in chunks]
        plan, group = self.adjustments.plan(sequences), graph.group
        if plan is not None:
            logits = graph.logits if group is None else group.gather_rows(graph.logits, graph.inputs.shape[1])
            return self._sample(logits[: len(chunks)], chunks, slots, plan)
        graph.draw.replay()
        num_best = most_logprobs(sequences)
        if num_best is None:
            return report(graph.logits, graph.tokens[: len(chunks)], None, None)
        own = graph.own_rows
        temperature = self.slots.controls(graph.inputs[1, own].long()).temperature
        rows = report(graph.logits, graph.tokens[own], temperature, num_best)
        if group is not None:
            rows = group.gather(rows.view(1, -1)).view(-1, rows.shape[1])
        return rows[: len(chunks)]

    def _compute(self, chunks: list[Chunk], slots: list[int], *, takes_graphs: bool) -> torch.Tensor | None:
        """Any step; as one graph, or by pieces, where takes_graphs and there are such."""
        hidden = self._hidden(chunks, slots, takes_graphs=takes_graphs)
        score_prompts(self.model, hidden, chunks)
        sampling = [(chunk, slot) for chunk, slot in zip(chunks, slots, strict=True) if chunk.is_last]
        if not sampling:
            return None
        logits = self.model.logits(hidden[self._tensor(_last_rows(chunks))])  # [B, V] fp32
        plan = self.adjustments.plan([chunk.sequence for chunk, _ in sampling])
        return self._sample(logits, [chunk for chunk, _ in sampling], [slot for _, slot in sampling], plan)

    def _hidden(self, chunks: list[Chunk], slots: list[int], *, takes_graphs: bool) -> torch.Tensor:
        """[T, hidden_size] of a step's tokens."""
        planned = None if self.mixed_graphs is None or not takes_graphs else self.mixed_graphs.plan(chunks)
        if self.mixed_graphs is not None and planned is not None:
            hidden = self.mixed_graphs.run(planned, chunks, slots)
            if hidden is not None:
                return hidden
        context = PagedContext.build(
            [(chunk.start, chunk.end) for chunk in chunks],
            [chunk.sequence.page_table for chunk in chunks],
            self.layers,
            self.model.numerics.exact,
            self.model.device,
        )
        token_ids = self._token_ids(chunks, slots)
        if self.prompt_graphs is not None and planned is None and takes_graphs:
            hidden = self.prompt_graphs.run(token_ids, context)
            if hidden is not None:
                return hidden
        with contextlib.nullcontext() if self.choices is None else self.choices.recording(context.slot_mapping):
            return self.model(token_ids, context)

    def _sample(self, logits: torch.Tensor, chunks: list[Chunk], slots: list[int], plan: Plan | None) -> torch.Tensor:
        """The report on one new token for each row of logits; plan is what changes them for the draw."""
        sequences = [chunk.sequence for chunk in chunks]
        rows = self._tensor(slots)
        controls = self.slots.controls(rows)
        adjusted = logits if plan is None else self.adjustments.apply(logits, plan)
        tokens = sample(adjusted, *controls, self._tensor([chunk.end for chunk in chunks]))
        if plan is not None:
            self.adjustments.count(tokens, plan)
        self.slots.last_token[rows] = tokens
        return report(logits, tokens, controls.temperature, most_logprobs(sequences))

    def _token_ids(self, chunks: list[Chunk], slots: list[int]) -> torch.Tensor:
        """[T] int64, those that are not known yet from their slots."""
        ids: list[int] = []
        pending: list[tuple[int, int]] = []  # (row, slot)
        for chunk, slot in zip(chunks, slots, strict=True):
            ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            if chunk.has_pending:
                pending.append((len(ids), slot))
                ids.append(0)
        token_ids = self._tensor(ids)
        if pending:
            rows, from_slots = self._tensor(pending).unbind(1)
            token_ids[rows] = self.slots.last_token[from_slots]
        return token_ids

    def _tensor(self, values: list[int] | list[tuple[int, int]]) -> torch.Tensor:
        return send(values, torch.int64, self.model.device)


def _to_host(rows: torch.Tensor | None) -> "tuple[torch.Tensor | None, torch.cuda.Event | None]":
    """Start a copy to the host; and when it is there."""
    if rows is None or not rows.is_cuda:
        return rows, None
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready


def _last_rows(chunks: list[Chunk]) -> list[int]:
    """Row of the last token of each chunk that samples."""
    rows, end = [], 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.is_last:
            rows.append(end - 1)
    return rows
