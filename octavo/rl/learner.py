"""The learning half of a step: logprobs of the rollouts with gradient, exactness check, loss, backward, update."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NoReturn

import torch

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.errors import ExactnessError, NonFiniteError
from octavo.models import Decoder
from octavo.models.export import reshard
from octavo.models.scoring import joined_logprobs
from octavo.nn.finite_weights import check_finite_weights
from octavo.nn.live_weights import stop_watching
from octavo.numerics.infinity import take_infinity
from octavo.parallel import kept, set_last_backward
from octavo.rl.config import RLConfig
from octavo.rl.correction import Correction, correct
from octavo.rl.health import HealthMonitor, HealthStatus
from octavo.rl.losses import token_coefficients
from octavo.rl.metrics import mismatch_metrics, repetition_share
from octavo.rl.objective import CorrectionProbe, Objective, TokenBatch, policy_objective
from octavo.rl.ranks import check_pieces
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.router_replay import PolicyRouters
from octavo.run.first_bad_tensor import first_bad_tensor
from octavo.run.optimizer import MasterAdamW

_Shares = tuple[dict[str, float], torch.Tensor | None]  # of a micro-batch: of the metrics, and what routers chose


@dataclasses.dataclass(frozen=True)
class Update:
    """What one rollout step taught.

    Attributes:
        trainer_logprobs: [tokens] fp32, of the rollouts under the weights that sampled them. Where exact mode leaves
            the later minibatches unchecked (trainer.check_exact_every), theirs are the sampler's.
        metrics: name -> number.
        health: what the limits of [health] say; where it blocks the update, nothing was updated.
    """

    trainer_logprobs: torch.Tensor
    metrics: dict[str, float]
    health: HealthStatus


@torch.no_grad()
def score_rollouts(
    model: Decoder,
    rollouts: Rollouts,
    temperature: float,
    chunk: int,
    routers: PolicyRouters | None = None,
    mesh: Mesh = ONE_PROCESS,
) -> torch.Tensor:
    """response_logprobs without gradient, `chunk` sequences in one forward pass (0 for all): [tokens] fp32.

    Args:
        routers: the model's, which may replay the sampler's choices; None for its own ones.
        mesh: of the ranks that the model is sharded over, which take the passes in turn; all get all logprobs.
    """
    starts = range(0, len(rollouts), chunk or max(len(rollouts), 1))
    scores = []
    for first in range(0, len(starts), mesh.world_size):
        # where a sharded model runs, all ranks do; what is computed beyond the last piece is left out below
        start = starts[min(first + mesh.rank, len(starts) - 1)]
        piece = rollouts.part(start, min(start + starts.step, len(rollouts)))
        with contextlib.nullcontext() if routers is None else routers.scoring(piece):
            scores.append(packed_logprobs(model, piece, temperature))
    own = torch.cat(scores).cpu()  # once: the GPU goes on while the next piece is prepared
    if mesh.world_size == 1:
        return own
    parts = [part.clone() for part in own.split([len(score) for score in scores])]  # lest each is sent with all
    return torch.cat(mesh.gather_dealt(parts, len(starts)))


def response_logprobs(model: Decoder, rollouts: Rollouts, temperature: float) -> torch.Tensor:
    """The model's logprobs of the response tokens.

    Returns:
        [tokens] fp32 on the CPU, packed as in Rollouts, differentiable in the weights.
    """
    return packed_logprobs(model, rollouts, temperature).cpu()


def packed_logprobs(model: Decoder, rollouts: Rollouts, temperature: float) -> torch.Tensor:
    """response_logprobs where the model is."""
    logprobs, counts = joined_logprobs(model, rollouts.sequences, temperature, prompt_lens=rollouts.prompt_lens)
    if not rollouts.is_sampled:
        return logprobs
    pairs = zip(logprobs.split(counts), rollouts.is_sampled, strict=True)  # what an environment wrote is in no loss
    return torch.cat([x[torch.tensor(mask, device=x.device)] for x, mask in pairs])


def check_exact(
    trainer_logprobs: torch.Tensor, rollouts: Rollouts, step: int, first_sequence: int = 0, whose: str = "trainer"
) -> None:
    """Exact mode's promise: every trainer logprob equals the sampler's.

    Args:
        trainer_logprobs: [tokens] fp32: the very tensor that the loss back-propagates through.
        first_sequence: index in the step of the rollouts' first sequence, for the message.
        whose: logprobs they are, for the message.
    Raises:
        ExactnessError: names step, sequence, position and both values of the largest difference.
    """
    trainer = trainer_logprobs.detach()
    differs = ~(trainer == rollouts.rollout_logprobs)  # so written that NaN differs
    if not differs.any():
        return
    delta = (trainer - rollouts.rollout_logprobs).abs().nan_to_num(nan=math.inf)
    token = int(torch.where(differs, delta, -1.0).argmax())
    sequence, position = rollouts.locate(token)
    raise ExactnessError(
        f"step {step}, sequence {first_sequence + sequence} (prompt {rollouts.prompts[sequence]!r}), position "
        f"{position} of its response: the {whose}'s logprob is {float(trainer[token])!r}, the sampler's "
        f"{float(rollouts.rollout_logprobs[token])!r}; exact = true promises equal bits, but {int(differs.sum())} of "
        f"{len(differs)} tokens differ. Nothing was updated from them; where two numerics are meant, set "
        "exact = false and correction.kind = 'token_tis'; a server must run with the config's --quantization, "
        "--kv-cache-dtype and --exact"
    )


class Learner:
    """Updates the policy from rollouts.

    Args:
        model: the policy, in the trainer's numerics.
        reference: the frozen policy that algorithm.kl_coef refers to, or None.
        mesh: of the ranks that both are sharded over; all make each call, with the same rollouts. Micro-batches are
            dealt to them in turn, and with parallel.reduction = "ordered" everything has the bits of one process.
    """

    def __init__(
        self, model: Decoder, config: RLConfig, reference: Decoder | None = None, mesh: Mesh = ONE_PROCESS
    ) -> None:
        self.model, self.mesh = model, mesh
        self.reference = reference
        self.config = config
        self.optimizer = MasterAdamW(model, config.trainer.optimizer)
        stop_watching(model)  # which nothing else writes
        self.num_updates = 0
        self.num_updates_begun = 0  # since the start of the process, also those that failed
        self.health = HealthMonitor(config.health)
        self.routers = PolicyRouters(model, config)

    def learn(self, rollouts: Rollouts, advantages: torch.Tensor, step: int) -> Update:
        """One pass over a step's rollouts: `config.num_minibatches` optimizer steps.

        Args:
            advantages: [sequences] fp32.
            step: from 1; for messages, correction.effect_every and trainer.check_exact_every.
        Raises:
            ConfigError: the ranks would not have as many micro-batches as each other.
            ExactnessError: in exact mode; no update is made from the minibatch that raises.
            NonFiniteError: likewise.
        """
        check_pieces(self.config, self.mesh, len(rollouts))
        keeps = self.config.trainer.gather_once
        with _host_math(self.model.device), kept(self.model) if keeps else contextlib.nullcontext():
            return self._learn(rollouts, advantages, step)

    def _learn(self, rollouts: Rollouts, advantages: torch.Tensor, step: int) -> Update:
        correction = self.config.correction
        has_effect = correction.kind != "none" and correction.effect_every > 0
        measures = has_effect and (step - 1) % correction.effect_every == 0
        size = len(rollouts) // self.config.num_minibatches
        before = self._look_before(rollouts, advantages, size, step)
        probe = CorrectionProbe(self.model) if measures else None
        chunk = self.config.trainer.micro_batch_sequences
        first = _Span(rollouts, before.of_first, 0, size, is_on_policy=True).split(chunk)
        own, shares = self._add_gradients(first, step, probe)
        trainer_logprobs = before.complete(own)
        checked = self._measure_mismatch(rollouts, trainer_logprobs, before.num_checked)  # while the GPU computes
        sums = self._clip_gradients(first, shares, step)
        entropy = {"actor/entropy": float(-rollouts.rollout_logprobs.double().mean())}
        status = self.health.check(step, checked | entropy)
        effect = {} if probe is None else probe.metrics()
        metrics = [sums | effect | self._make_update(status)]
        for start in range(size, len(rollouts), size):
            pieces = _Span(rollouts, before.tokens, start, start + size, is_on_policy=False).split(chunk)
            _, shares = self._add_gradients(pieces, step, None)
            sums = self._clip_gradients(pieces, shares, step)
            metrics.append(sums | self._make_update(status))
        names = {name: None for row in metrics for name in row}
        values = {name: [row[name] for row in metrics if name in row] for name in names}
        means = {name: sum(each) / len(each) for name, each in values.items()}  # over the minibatches that have it
        every = checked | status.metrics | before.metrics | means | self.routers.metrics()
        return Update(trainer_logprobs, every, status)

    def _measure_mismatch(
        self, rollouts: Rollouts, trainer_logprobs: torch.Tensor, num_checked: int
    ) -> dict[str, float]:
        """How far the two sides are apart before the step's first update.

        Args:
            num_checked: the first sequences, whose logprobs the trainer has computed.
        """
        correction, known = self.config.correction, rollouts.part(0, num_checked)
        low = correction.low if correction.kind == "icepop" else None
        pair = (trainer_logprobs[: known.num_tokens], known.rollout_logprobs)
        measured = mismatch_metrics(*pair, known.response_lens, correction.cap, low)
        measured["mismatch/tokens_checked_share"] = known.num_tokens / rollouts.num_tokens
        pairs = zip(rollouts.sequences, rollouts.prompt_lens, strict=True)
        measured["response/repetition_share"] = repetition_share([ids[n:] for ids, n in pairs])
        return measured

    def _look_before(self, rollouts: Rollouts, advantages: torch.Tensor, size: int, step: int) -> "_Before":
        """What is known of each token before the first update; `size` is a minibatch's."""
        config = self.config
        lens = rollouts.response_lens
        old, num_own = self._old_logprobs(rollouts, size, step)
        reference = None
        if self.reference is not None:
            temperature, chunk = config.rollout.temperature, config.trainer.micro_batch_sequences
            self.mesh.at(f"step {step}: logprobs of the reference")
            reference = score_rollouts(self.reference, rollouts, temperature, chunk, mesh=self.mesh)
        found = Correction(None, None, {})
        if config.correction.needs_whole_step:
            found = correct(config.correction, old, rollouts.rollout_logprobs, lens)
        lens_tensor = torch.tensor(lens)
        tokens = TokenBatch(
            rollout_logprobs=rollouts.rollout_logprobs,
            advantages=advantages.repeat_interleave(lens_tensor),
            coefficients=self._coefficients(lens, size, found.is_kept),
            old_logprobs=old,
            reference_logprobs=reference,
            sequence_ids=torch.arange(len(lens)).repeat_interleave(lens_tensor),
            weights=found.weights,
        )
        return _Before(tokens, num_own, size if config.exact and num_own else len(rollouts), found.metrics)

    def _old_logprobs(self, rollouts: Rollouts, size: int, step: int) -> tuple[torch.Tensor, int]:
        """The policy's logprobs before the step's first update, which later minibatches and corrections of a whole step
        need.

        Returns:
            ([tokens] fp32, the number of sequences from the first on in whose place the sampler's stand: those of the
            first minibatch, which computes its own before it updates anything, or 0).
        """
        config, reported = self.config, rollouts.rollout_logprobs
        every = config.trainer.check_exact_every
        scores_all = config.correction.needs_whole_step
        if config.exact:
            is_due = every > 0 and (step - 1) % every == 0
            scores_all = size < len(rollouts) and (is_due or not any(rollouts.response_lens[:size]))
            if not scores_all:
                return reported, size
        num_own = 0 if scores_all else size
        later = rollouts.part(num_own, len(rollouts))
        if not len(later):
            return reported, num_own
        self.mesh.at(f"step {step}: logprobs before the update")
        temperature, chunk = config.rollout.temperature, config.trainer.micro_batch_sequences
        scores = score_rollouts(self.model, later, temperature, chunk, self.routers, self.mesh)
        if config.exact:
            check_exact(scores, rollouts, step)
        return torch.cat([reported[: len(reported) - len(scores)], scores]), num_own

    def _coefficients(self, lens: list[int], size: int, is_kept: torch.Tensor | None) -> torch.Tensor:
        pieces, first = [], 0
        for start in range(0, len(lens), size):
            part = lens[start : start + size]
            own = None if is_kept is None else is_kept[first : first + sum(part)]
            first += sum(part)
            aggregation, limit = self.config.algorithm.loss_aggregation, self.config.rollout.max_tokens
            pieces.append(token_coefficients(part, aggregation, is_kept=own, max_tokens=limit))
        return torch.cat(pieces)

    def _add_gradients(
        self, pieces: list["_Span"], step: int, probe: CorrectionProbe | None
    ) -> tuple[torch.Tensor, list[_Shares]]:
        """The gradients of an optimizer step; a GPU may not have them yet.

        Args:
            pieces: the minibatch's micro-batches.
        Returns:
            (the minibatch's logprobs, this rank's shares of its metrics by micro-batch).
        """
        self.optimizer.zero_grad()
        logprobs, shares = [], list[_Shares]()
        num_tokens = sum(map(len, pieces[0].rollouts.sequences[pieces[0].start : pieces[-1].stop]))
        rank, num_ranks = self.mesh.rank, self.mesh.world_size
        try:
            for first in range(0, len(pieces), num_ranks):
                piece = pieces[first + rank]
                self.mesh.at(f"step {step}: micro-batch {first + rank}")
                sequences = piece.rollouts.part(piece.start, piece.stop)
                set_last_backward(self.model, first + num_ranks == len(pieces))
                with self.routers.training(sequences, num_tokens, is_on_policy=piece.is_on_policy):
                    piece_logprobs, piece_sums = self._backward(pieces[first : first + num_ranks], step, probe)
                logprobs += piece_logprobs
                shares.append((piece_sums, self.routers.take()))
        finally:
            set_last_backward(self.model, True)  # an error must not leave the model waiting for another one
        return torch.cat(logprobs), shares

    def _clip_gradients(self, pieces: list["_Span"], shares: list[_Shares], step: int) -> dict[str, float]:
        """Clip what _add_gradients left; its metrics, for which the device is waited for."""
        norm = self.optimizer.clip_gradients(self.config.trainer.optimizer.max_grad_norm)
        grad_norm, is_infinite = torch.stack([norm, take_infinity(norm.device)]).tolist()
        sums, on_host = dict[str, float](), [(own, None if x is None else x.cpu()) for own, x in shares]
        for of_piece, of_routers in self.mesh.gather_dealt(on_host, len(pieces)):
            sums = {name: sums.get(name, 0.0) + value for name, value in of_piece.items()}
            self.routers.add(of_routers)
        if self.mesh.any(bool(is_infinite)) or not (math.isfinite(grad_norm) and math.isfinite(sums["actor/loss"])):
            own = pieces[self.mesh.rank :: self.mesh.world_size]
            self._explain_nonfinite(sums["actor/loss"], grad_norm, own, step)
        return sums | {"actor/grad_norm": grad_norm}

    def _make_update(self, status: HealthStatus) -> dict[str, float]:
        """One optimizer step, unless the step's health forbids it; its metrics."""
        if status.blocks_update:
            return {"actor/lr": 0.0}
        warmup = min(1.0, (self.num_updates + 1) / max(self.config.trainer.lr_warmup_steps, 1))
        lr = self.config.trainer.optimizer.lr * warmup
        self.num_updates_begun += 1
        self.optimizer.step(lr=lr)
        reshard(self.model)  # what is kept has the weights of before
        self.num_updates += 1
        return {"actor/lr": lr}

    def _backward(
        self, pieces: list["_Span"], step: int, probe: CorrectionProbe | None
    ) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Add one micro-batch's gradient on each rank.

        Args:
            pieces: one a rank.
        Returns:
            (logprobs of each rank's, this one's shares of the metrics).
        """
        piece = pieces[self.mesh.rank]
        logprobs = self._logprobs(piece)
        vectors = self.mesh.gather_vectors(logprobs.detach(), [each.num_tokens for each in pieces])
        logprobs, everyone = logprobs.cpu(), [vector.cpu() for vector in vectors]
        checked = enumerate(everyone) if self.config.exact and piece.is_on_policy else ()
        for rank, found in checked:  # all of them on all ranks alike, before any goes on
            whose = f"trainer on rank {rank}" if len(everyone) > 1 else "trainer"
            start, stop = pieces[rank].start, pieces[rank].stop
            check_exact(found, piece.rollouts.part(start, stop), step, start, whose)
        objective = self._objective(piece, logprobs)
        if probe is not None:
            probe.add(objective)
        objective.loss.backward()
        self.optimizer.accumulate_gradients()
        return everyone, objective.sums

    def _logprobs(self, piece: "_Span") -> torch.Tensor:
        rollouts = piece.rollouts.part(piece.start, piece.stop)
        return packed_logprobs(self.model, rollouts, self.config.rollout.temperature)

    def _objective(self, piece: "_Span", logprobs: torch.Tensor) -> Objective:
        return policy_objective(logprobs, piece.token_batch(), self.config.algorithm, self.config.correction)

    def _explain_nonfinite(self, loss: float, grad_norm: float, own: list["_Span"], step: int) -> NoReturn:
        """Say what is inf or NaN, and on several ranks also whose tensor was the first; all of them call this."""
        self.optimizer.zero_grad()
        remedy = "nothing was updated; lower trainer.optimizer.lr, and look at the last steps' rewards and logprobs"
        first = ""
        if self.mesh.world_size > 1:
            found = first_bad_tensor(
                self.model, own, lambda _, piece: self._objective(piece, self._logprobs(piece).cpu()).loss, self.mesh
            )
            first = f"; the first tensor to go bad: {found or 'nothing when the step was run again'}"
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            raise NonFiniteError(
                f"step {step}: the loss is {loss} and the gradient's norm {grad_norm}{first}; {remedy}"
            )
        if not first:
            check_finite_weights(self.model)  # names the parameter, where it is one
        raise NonFiniteError(
            f"step {step}: an input or gradient of a linear in FP8 was infinite, in the trainer or while it sampled, "
            f"which loss and gradients do not show{first}; {remedy}"
        )


@contextlib.contextmanager
def _host_math(device: torch.device) -> Iterator[None]:
    """Beside a model on a GPU the CPU's own share, on a float a token, runs on one thread.

    Waking the others takes longer than the math: 18,000 exponentials took 9 ms instead of 0.1 on a machine of 16 cores.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cuda" or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclasses.dataclass(frozen=True)
class _Before:
    """What is known of a step before its first update.

    Attributes:
        tokens: of all sequences; in the place of some of old_logprobs stand the sampler's.
        num_own: the number of these sequences: the first minibatch's, or 0.
        num_checked: sequences from the first on whose logprobs the trainer computes.
        metrics: correction's.
    """

    tokens: TokenBatch
    num_own: int
    num_checked: int
    metrics: dict[str, float]

    @property
    def of_first(self) -> TokenBatch:
        """As the first minibatch needs it, whose own logprobs are those before the update."""
        return dataclasses.replace(self.tokens, old_logprobs=None) if self.num_own else self.tokens

    def complete(self, own: torch.Tensor) -> torch.Tensor:
        """[tokens] logprobs before the update, with the first minibatch's own."""
        assert self.tokens.old_logprobs is not None, "_look_before sets it"
        return torch.cat([own, self.tokens.old_logprobs[len(own) :]]) if self.num_own else self.tokens.old_logprobs


@dataclasses.dataclass(frozen=True)
class _Span:
    """The sequences start to stop of a step: a minibatch, or a micro-batch of one; on-policy before any update."""

    rollouts: Rollouts
    tokens: TokenBatch
    start: int
    stop: int
    is_on_policy: bool

    def split(self, size: int) -> list["_Span"]:
        """Micro-batches of `size` sequences, the last maybe smaller; 0 for one of all."""
        starts = range(self.start, self.stop, size or self.stop - self.start)
        ends = (*starts[1:], self.stop)
        return [dataclasses.replace(self, start=a, stop=b) for a, b in zip(starts, ends, strict=True)]

    @property
    def num_tokens(self) -> int:
        """Of its responses."""
        return sum(self.rollouts.response_lens[self.start : self.stop])

    def token_batch(self) -> TokenBatch:
        """Its tokens' part of the step's."""
        bounds = [0, *itertools.accumulate(self.rollouts.response_lens)]
        return self.tokens.narrow(bounds[self.start], bounds[self.stop])
