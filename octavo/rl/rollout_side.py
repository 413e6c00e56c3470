"""The rollout side of a run: the sampler's model and engine, how new weights reach them, and its KV scales."""

import contextlib

from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.rl.asynchronous import AsyncEngine, own_weights
from octavo.rl.config import RLConfig
from octavo.rl.engines.build import build_engine
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.protocol import RolloutEngine
from octavo.rl.precision import audit_precision
from octavo.rl.progress import RLProgress
from octavo.rl.refit import RefitReport, refit, share_weights
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.tasks import Task, encode_prompts
from octavo.weights.kv_scales.keeper import FallbackRule, KVScaleKeeper


class RolloutSide:
    """Whatever samples, and what it must be handed.

    Args:
        model: the policy, in the trainer's numerics; the sampler is the same object in exact mode, shares its tensors
            otherwise, and has a copy of its own in asynchronous mode.

    Attributes:
        sampler: the policy in the sampler's numerics. engine: who samples from it.
        kv_scales: keeps its KV scales.
    """

    def __init__(
        self, config: RLConfig, model: Decoder, tokenizer: Tokenizer, task: Task, progress: RLProgress
    ) -> None:
        self._config, self._model, self._tokenizer, self._task = config, model, tokenizer, task
        self.is_asynchronous = config.asynchronous.max_policy_lag > 0
        if self.is_asynchronous:
            self.sampler = own_weights(model, config.rollout_numerics)
        else:
            self.sampler = model if config.exact else share_weights(model, config.rollout_numerics)
        engine = build_engine(
            config.engine,
            self.sampler,
            tokenizer,
            max_num_seqs=config.rollout.max_num_seqs,
            seed=config.run.seed,
            router_replay=config.router_replay,
        )
        if self.is_asynchronous:
            assert isinstance(engine, EmbeddedEngine), "the config refuses others"
            engine = AsyncEngine(engine.llm, config.asynchronous.partial_rollouts)
        self.engine: RolloutEngine = engine
        rollout = config.rollout
        self.kv_scales = KVScaleKeeper(
            model,
            self.sampler,
            rule=FallbackRule(rollout.kv_fallback_clip_share, rollout.kv_fallback_flush_share),
            margin=rollout.kv_scale_margin,
            lay_out=self._lay_out_cache,
            say=progress.say,
        )

    @property
    def num_requests(self) -> int | None:
        """Requests that the embedded engine has had, which seed the next one's noise; None for an engine elsewhere."""
        return self.engine.llm.engine.num_requests if isinstance(self.engine, EmbeddedEngine) else None

    @num_requests.setter
    def num_requests(self, value: int | None) -> None:
        if isinstance(self.engine, EmbeddedEngine) and value is not None:
            self.engine.llm.engine.num_requests = value

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Within, nothing is sampled."""
        return self.engine.exclusive() if isinstance(self.engine, AsyncEngine) else contextlib.nullcontext()

    def refit(self, rollouts: Rollouts | None = None) -> RefitReport:
        """Hand over the trainer's weights, with the KV scales where the trainer makes them.

        Args:
            rollouts: the batch that was just trained on; None before the first.
        Raises:
            RecipeError: a layer that does not compute in the numerics of its side. See octavo.rl.refit.refit.
        """
        audit_precision(self._model, "trainer")
        if self.sampler is not self._model:
            audit_precision(self.sampler, "sampler")
        hand_over = self.kv_scales.calibrate(rollouts.sequences) if rollouts is not None else lambda: None
        if isinstance(self.engine, AsyncEngine):
            return self.engine.publish(self._model, hand_over)
        hand_over()
        return refit(self._model, self.sampler, self.engine)

    def calibrate_on_prompts(self, prompts: list[str]) -> None:
        """Before the very first rollouts: scales from their prompts, where the trainer is to make them."""
        if not self.kv_scales.needs_first_prompts:
            return
        ids = encode_prompts(self._task, prompts, self._tokenizer)
        with self.exclusive():
            self.kv_scales.calibrate(ids)()

    def finish_step(self, rollouts: Rollouts) -> dict[str, float]:
        """kv/... metrics of the step's rollouts, after its update; layers may fall back to bf16."""
        with self.exclusive():
            return self.kv_scales.finish_step(int(rollouts.weight_versions.max()))

    def lay_out_cache(self) -> None:
        """Allocate the engine's KV cache as the table of scales has it."""
        if self.kv_scales.table is not None and self.kv_scales.table.high_precision:
            self._lay_out_cache()

    def _lay_out_cache(self) -> None:
        if isinstance(self.engine, EmbeddedEngine):
            self.engine.llm.engine.lay_out_cache()
