"""Evaluation in bf16 whatever the run's numerics: greedy answers of an engine over the policy's own weights."""

from typing import Any

from octavo.distributed.outcome import all_do
from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.numerics import Numerics
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.protocol import SamplingSpec
from octavo.rl.prompts import check_context
from octavo.rl.ranks import Ranks
from octavo.rl.rollout import generate_rollouts, score_all
from octavo.rl.tasks import EnvironmentTask, Task, encode_prompts
from octavo.serve import LLM
from octavo.weights.refit import share_weights


class Evaluator:
    """A bf16 engine that shares the policy's parameters and leaves its numerics alone.

    Args:
        model: the policy.
        max_tokens: length limit of an answer.
        ranks: that the policy is sharded over, which answer in turn; None for one process.
        sampler: on several ranks, the rollouts' own; where it is cut, its slices of the policy answer.

    Attributes:
        model: the bf16 decoder that the engine runs.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        task: Task,
        max_tokens: int,
        max_num_seqs: int,
        ranks: Ranks | None = None,
        sampler: Decoder | None = None,
    ) -> None:
        self.task = task
        self.max_tokens = max_tokens
        self._group = None if ranks is None else ranks.mesh.host_group
        limits: dict[str, Any] = {"tokenizer": tokenizer, "max_num_seqs": max_num_seqs}
        if ranks is None:
            self.model = share_weights(model, Numerics())
            self._engine = EmbeddedEngine(LLM(self.model, **limits, warm_up=False))
        else:
            if sampler is not None and sampler.tensor_group is not None:
                self.model = share_weights(sampler, Numerics())
            else:
                self.model = ranks.view(Numerics())
            self._engine = ranks.engine(self.model, **limits)

    def mean_reward(self, prompts: list[str], temperature: float = 0.0) -> float:
        """Mean reward over prompts, one answer each; greedy at temperature 0.

        Raises:
            ConfigError: a prompt that leaves less than max_tokens of the context.
            DataError: the verifier raises or gives no finite reward, on any rank.
        """
        self.model.mark_weights_updated()
        if isinstance(self.task, EnvironmentTask):
            episodes = generate_rollouts(
                self._engine,
                self.task,
                prompts,
                samples_per_prompt=1,
                max_tokens=self.max_tokens,
                temperature=temperature,
                group=self._group,
            )
            return float(episodes.rewards.mean())
        inputs = all_do(self._group, lambda: encode_prompts(self.task, prompts, self._engine.tokenizer))
        check_context(prompts, [len(ids) for ids in inputs], self.max_tokens, self._engine.max_model_len)
        spec = SamplingSpec(1, self.max_tokens, temperature, self.task.end or None, has_logprobs=False)
        answers = [output.completions[0] for output in self._engine.generate(inputs, spec)]
        # the engine cuts the text before what stopped it
        texts = [a.text + (self.task.end if a.stop_reason == self.task.end else "") for a in answers]
        return sum(score_all(self.task, prompts, texts, self._group)) / len(prompts)
