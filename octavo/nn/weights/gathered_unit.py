"""GatheredUnit: weights of one FSDP unit whose codes are made together, by one launch, where the first is asked for."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.gathered import GatheredWeight
from octavo.nn.weights.shared_scales import SharedScales
from octavo.nn.weights.write_watch import WriteWatch
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize.many import MatrixBatch


class GatheredUnit:
    """Weights that FSDP2 asks for in turn, in one gather, of one scaling and dtype.

    Codes are made for the forward and again for the backward: kept in between they would take more memory than codes
    save in flight, and making them takes less time than reading one. A weight's one scale is fixed once a version of
    its rows.

    Args:
        linears: modules whose source is a GatheredWeight; they may get another one later.
        scales: of weights with one scale that no history gives.

    Attributes:
        scaling: of all its weights.
    """

    def __init__(self, linears: Sequence[Any], scales: SharedScales | None = None) -> None:
        self._linears = [weakref.ref(linear) for linear in linears]
        self.scaling: Scaling = linears[0].source.scaling
        self._scales = scales
        self._sources: list[GatheredWeight] = []  # that the rest is of
        self._addresses: list[int] = []
        self._batch: MatrixBatch | None = None
        self._made: dict[GatheredWeight, tuple[torch.Tensor, ...]] = {}  # what this gather has yet to ask for
        self._keys: list[tuple[int, ...] | None] = []  # of the versions that quant_scales are of
        self._quant_scales: torch.Tensor | None = None  # [weights] fp32
        self._watch = WriteWatch()
        for linear in linears:
            linear.source.unit = self
        if scales is not None:
            scales.add(self)

    def send(self, linear: Any) -> tuple[torch.Tensor, ...]:
        """What an all-gather takes of this rank for a linear's weight: codes as uint8 and, of blocks, their scales."""
        source = linear.source
        pieces = self._made.pop(source, None)
        if pieces is not None:
            return pieces
        # training steps go on with what an evaluation made
        with torch.inference_mode(False), torch.no_grad():
            self._make()
        return self._made.pop(source)

    def stop_watching(self) -> None:
        """See WeightSource."""
        self._watch.end()

    def forget(self) -> None:
        """Hold on to no shard: some weight gets another."""
        self._batch = None
        self._made.clear()

    def shard_states(self) -> list[tuple[int, ...]]:
        """Changes when the rows of a weight may have: alike on all ranks that run one program."""
        return [linear.source.shard_state() for linear in self._members()]

    def fold_amaxes(self) -> torch.Tensor:
        """[weights] fp32: max|x| of this rank's rows of each."""
        batch = self._look_at(self._members())
        amaxes = torch.zeros(len(self._sources), device=batch.device)
        batch.fold_amaxes(amaxes)
        return amaxes

    def _members(self) -> list[Any]:
        linears = [linear for ref in self._linears if (linear := ref()) is not None]
        return [linear for linear in linears if getattr(linear.source, "unit", None) is self]

    def _look_at(self, linears: list[Any]) -> MatrixBatch:
        """Take the sources and their shards as they are now."""
        sources = [linear.source for linear in linears]
        rows = [source.local for source in sources]
        addresses = [tensor.data_ptr() for tensor in rows]
        if sources != self._sources:
            self._sources, self._keys, self._quant_scales = sources, [None] * len(sources), None
        if self._batch is None or addresses != self._addresses:
            self._addresses = addresses
            self._batch = MatrixBatch([tensor.detach() for tensor in rows], self.scaling)
        return self._batch

    def _make(self) -> None:
        """Make what is sent of all weights."""
        linears = self._members()
        batch = self._look_at(linears)
        if not self.scaling.is_per_tensor:
            self._made = dict(zip(self._sources, zip(*batch.quantize(), strict=True), strict=True))
            return
        keys, is_new, amaxes = self._renew_scales(linears, batch.matrices)
        codes, scales = batch.quantize(self._quant_scales, amaxes)
        # the forward's GEMMs may still wait to read the others
        newer = [index for index, is_newer in enumerate(is_new) if is_newer]
        if newer:
            made = torch.stack(list(scales)).view(-1, 1, 1)
            for index in newer:
                self._sources[index].scale = made[index]
        self._keys = keys  # last: after an error, versions are new still
        self._made = {source: (piece,) for source, piece in zip(self._sources, codes, strict=True)}

    def _renew_scales(
        self, linears: list[Any], matrices: list[torch.Tensor]
    ) -> tuple[list[tuple[int, ...] | None], list[bool], list[torch.Tensor] | None]:
        """Take quant_scales of new versions, which a history or all ranks' amaxes give.

        Returns:
            (the versions that scales are of then, whether each weight is another one, where delayed scaling stages
            amaxes).
        """
        sources, keys = self._sources, [source.shard_state() for source in self._sources]
        # a backward sends what its forward sent; stages comes last, and only what trains after an evaluation is new
        is_new = [
            old is None or old[:-1] != key[:-1] or old[-1] < key[-1] for old, key in zip(self._keys, keys, strict=True)
        ]
        if not any(is_new):
            if self._scales is not None and torch._C._current_graph_task_id() == -1:
                names = ", ".join(source.full_name for source in sources if source.full_name)
                self._watch.look(matrices, f"one of {names}" if len(sources) > 1 and names else names)
            return self._keys, is_new, None
        kept = [key if is_newer else old for key, old, is_newer in zip(keys, self._keys, is_new, strict=True)]
        if self._scales is not None:
            self._watch.begin(matrices, (sum(key[0] for key in keys), sum(key[1] + key[2] for key in keys)))
            self._quant_scales = self._scales.of(self)
            return kept, is_new, None
        return kept, is_new, self._take_over(linears, is_new)

    def _take_over(self, linears: list[Any], is_new: list[bool]) -> list[torch.Tensor] | None:
        """Copy the histories' scales, which may change before this forward's backward; returns where amaxes go."""
        scales, amaxes = [], []
        for index, (linear, source, is_newer) in enumerate(zip(linears, self._sources, is_new, strict=True)):
            if is_newer:
                state = linear.delayed_state(source.recipe)
                known = state.known(DelayedState.WEIGHT, observe=source.stages)
                scales.append(known["quant_scale"].view(1))
                amaxes.append(known.get("amax_out"))
            else:
                assert self._quant_scales is not None, "there is an older version"
                scales.append(self._quant_scales[index : index + 1])
                amaxes.append(None)
        self._quant_scales = torch.cat(scales)
        if all(amax is None for amax in amaxes):
            return None
        return [torch.zeros_like(scales[0]) if amax is None else amax for amax in amaxes]
