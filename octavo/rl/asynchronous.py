"""Asynchronous mode: a thread samples the next steps' rollouts while the trainer learns from the last ones.

The sampler has weights of its own, which each update is copied into between two steps of its engine. A bound on the
policy's lag says how far ahead sampling may begin: a batch for step s is begun only where no more than max_policy_lag
updates can come between, so that nothing older is ever trained on.
"""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from octavo.errors import OctavoError, RequestError
from octavo.models import Decoder
from octavo.nn import Linear
from octavo.numerics import Numerics, QuantizedTensor
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.protocol import Prompt
from octavo.rl.rollout_batch import Rollouts
from octavo.serve import LLM, SamplingParams
from octavo.serve.engine.driver import ClosedError, EngineDriver
from octavo.serve.outputs import RequestOutput
from octavo.weights.refit import RefitReport

PartialRollouts = Literal["continue", "drop"]


class PolicyLagError(OctavoError, RuntimeError):
    """Rollouts of older weights than max_policy_lag allows were about to be trained on."""


def own_weights(model: Decoder, numerics: Numerics) -> Decoder:
    """A frozen copy of the policy, for a sampler that goes on while the policy changes."""
    sampler = copy.deepcopy(model).requires_grad_(False)
    sampler.set_numerics(numerics)
    sampler.weight_version = model.weight_version
    return sampler


class AsyncEmbeddedEngine(EmbeddedEngine):
    """An embedded engine that one thread samples from while another hands it new weights.

    Args:
        llm: over weights of its own.
        partial: of rollouts that an update meets half done: "continue" goes on under the new weights, all keys and
            values computed again, every token stamped with the version that sampled it; "drop" samples them again.
    """

    def __init__(self, llm: LLM, partial: PartialRollouts = "continue") -> None:
        super().__init__(llm)
        self.partial = partial
        device = llm.model.device
        self._driver = EngineDriver(llm.engine, torch.cuda.Stream(device) if device.type == "cuda" else None)

    @property
    def num_restarted(self) -> int:
        """Prompts that were dropped and sampled again."""
        return self._driver.num_restarted

    def _sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
        """Other threads get their turn between any two steps."""
        engine = self.llm.engine
        inputs = [engine.make_input(self._encode(prompt), params) for prompt in prompts]
        return [engine.make_output(request) for request in self._driver.run(inputs, restart_aborted=True)]

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Within, the engine is between two steps and takes none."""
        return self._driver.exclusive()

    @torch.no_grad()
    def publish(
        self, trainer: Decoder, sampler: Decoder, hand_over_scales: Callable[[], None] = lambda: None
    ) -> RefitReport:
        """Copy the trainer's weights into the sampler's, between two steps. See RolloutEngine."""
        self.begin_update(sampler, trainer.weight_version)  # which refuses another sampler
        began = time.perf_counter()
        codes: list[QuantizedTensor] = []

        def write() -> int:
            theirs = dict(trainer.state_dict(keep_vars=True))
            for name, tensor in sampler.state_dict(keep_vars=True).items():
                tensor.copy_(theirs[name])
            sampler.mark_weights_updated()
            sampler.weight_version = trainer.weight_version
            linears = [module for module in sampler.modules() if isinstance(module, Linear)]
            codes.extend(q for linear in linears for q in linear.quantized_weight())
            hand_over_scales()
            return sampler.weight_version

        with self.exclusive():
            version = self.llm.engine.replace_weights(write, "keep" if self.partial == "continue" else "abort")
        return RefitReport(version, len(codes), sum(q.num_bytes for q in codes), time.perf_counter() - began)

    def close(self) -> None:
        """End what is being sampled: generate raises in the thread that called it."""
        self._driver.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.llm.tokenizer is None:
            raise RequestError("a string prompt needs a tokenizer, and this engine has none; give token ids")
        return self.llm.tokenizer.encode(prompt, add_special_tokens=True)


class RolloutProducer:
    """Samples the steps' rollouts in a thread of its own, as far ahead as the bound on lag lets it.

    Args:
        sample: makes one step's rollouts.
        engine: that it samples from.
        first_step: of the run.
        last_step: of the run.
        max_policy_lag: updates that may come between a token and its training.
        weight_version: of the policy that first_step trains.
    """

    def __init__(
        self,
        sample: Callable[[int], Rollouts],
        engine: AsyncEmbeddedEngine,
        *,
        first_step: int,
        last_step: int,
        max_policy_lag: int,
        weight_version: int,
    ) -> None:
        self._sample, self._engine, self._max_policy_lag = sample, engine, max_policy_lag
        self._steps = range(first_step, last_step + 1)
        self._num_published = first_step - 1  # updates that the engine has had
        self._update_of = {weight_version: self._num_published}
        self._done: dict[int, Rollouts] = {}
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="octavo-rollouts", daemon=True)

    def start(self) -> None:
        """Start to sample."""
        self._thread.start()

    def take(self, step: int) -> tuple[Rollouts, dict[str, float]]:
        """A step's rollouts, waited for, and async/... metrics.

        Raises:
            PolicyLagError: a token is older than the bound allows. Whatever sampling them raised.
        """
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: step in self._done or self._error is not None)
            if step not in self._done:
                assert self._error is not None, "waited for one of the two"
                raise self._error
            rollouts = self._done.pop(step)
        lag = self.policy_lag(rollouts, step)
        if int(lag.max()) > self._max_policy_lag:
            sequence, position = rollouts.locate(int(lag.argmax()))
            raise PolicyLagError(
                f"step {step}, sequence {sequence}, position {position} of its response: sampled {int(lag.max())} "
                f"updates before its training, asynchronous.max_policy_lag = {self._max_policy_lag}; nothing was "
                "updated from it"
            )
        versions = rollouts.weight_versions.split(rollouts.response_lens)
        return rollouts, {
            "async/policy_lag_mean": float(lag.double().mean()),
            "async/policy_lag_max": float(lag.max()),
            "async/mixed_versions_share": sum(len(v.unique()) > 1 for v in versions) / len(versions),
            "async/num_restarted": float(self._engine.num_restarted),
            "async/num_steps_ahead": float(len(self._done)),
            "async/wait_s": time.perf_counter() - began,
        }

    def policy_lag(self, rollouts: Rollouts, step: int) -> torch.Tensor:
        """[tokens] int64: updates between each token's weights and those that the step trains."""
        with self._changed:
            updates = [self._update_of[version] for version in rollouts.weight_versions.tolist()]
        return step - 1 - torch.tensor(updates)

    def note_published(self, weight_version: int) -> None:
        """The engine samples from a step's new weights: one more step may be begun."""
        with self._changed:
            self._num_published += 1
            self._update_of[weight_version] = self._num_published
            self._changed.notify_all()

    def close(self) -> None:
        """Stop sampling and wait for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._engine.close()
        if self._thread.is_alive():
            self._thread.join()

    def _main(self) -> None:
        try:
            for step in self._steps:
                least = step - 1 - self._max_policy_lag  # published updates
                with self._changed:
                    self._changed.wait_for(lambda least=least: self._is_closed or self._num_published >= least)  # type: ignore[misc]
                    if self._is_closed:
                        return
                rollouts = self._sample(step)
                with self._changed:
                    self._done[step] = rollouts
                    self._changed.notify_all()
        except ClosedError:
            return
        except BaseException as error:  # the trainer's thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
