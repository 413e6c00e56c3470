"""From a config's engine section to the engine: the embedded one, or one that is named here and imported when asked."""

from importlib import import_module
from typing import Any

from octavo.env import admin_key_from_env, api_key_from_env
from octavo.errors import ConfigError
from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.numerics import Numerics
from octavo.rl.engines.config import EngineSection
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.engines.protocol import RolloutEngine
from octavo.serve import LLM

# The plug point: engine.name -> "module:class" of a RolloutEngine behind a server. The class is called with (section,
# tokenizer, model config), octavo's own with router_replay too, and has check_reachable(section), as RemoteEngine in
# octavo.integrations.rollout.remote.
REMOTE = {
    "octavo-server": "octavo.integrations.rollout.octavo_server:OctavoServerEngine",
    "vllm": "octavo.integrations.rollout.vllm:VllmEngine",
    "sglang": "octavo.integrations.rollout.sglang:SglangEngine",
}


def check_engine(section: EngineSection, numerics: Numerics) -> None:
    """Before any work that would be lost: a remote engine can do what the run asks of it, and answers.

    Args:
        numerics: the sampler's.
    Raises:
        ConfigError: see build_engine.
        EngineError: it cannot be reached, is not ready, or is another engine.
    """
    if section.is_remote:
        _check_numerics(section, numerics)
        section = _with_keys(section)
        remote = _load(section.name)
        remote.check_reachable(section)
        if numerics.has_known_kv_scales:  # octavo's own server: see above
            remote.check_kv_scales(section, numerics)


def build_engine(
    section: EngineSection,
    sampler: Decoder,
    tokenizer: Tokenizer,
    *,
    max_num_seqs: int,
    seed: int,
    router_replay: bool = False,
) -> RolloutEngine:
    """The engine of a run; a server gets its first weights by the first refit.

    Args:
        sampler: the policy in the sampler's numerics.
        max_num_seqs: of the embedded engine.
        seed: of the embedded engine.
        router_replay: the trainer needs the experts that each token was sent to.
    Raises:
        ConfigError: an engine that cannot do what the numerics promise, or a key that is missing.
    """
    if not section.is_remote:
        return EmbeddedEngine(
            build_llm(sampler, tokenizer, max_num_seqs=max_num_seqs, seed=seed, router_replay=router_replay)
        )
    _check_has_experts(sampler, router_replay=router_replay)
    if router_replay:
        section.check_returns_experts()
    _check_numerics(section, sampler.numerics)
    own = {"router_replay": router_replay} if section.is_octavos else {}
    engine: RolloutEngine = _load(section.name)(_with_keys(section), tokenizer, sampler.config, **own)
    return engine


def build_llm(sampler: Decoder, tokenizer: Tokenizer, *, max_num_seqs: int, seed: int, router_replay: bool) -> LLM:
    """The LLM of an embedded engine; see build_engine."""
    _check_has_experts(sampler, router_replay=router_replay)
    return LLM(
        sampler,
        tokenizer=tokenizer,
        max_num_seqs=max_num_seqs,
        seed=seed,
        enable_return_routed_experts=router_replay,
    )


def _check_has_experts(sampler: Decoder, *, router_replay: bool) -> None:
    if router_replay and not sampler.config.num_experts:
        raise ConfigError("router_replay = true replays the choice of experts, and this policy has none; leave it out")


def _load(name: str) -> Any:
    module, _, cls = REMOTE[name].partition(":")
    return getattr(import_module(module), cls)


def _check_numerics(section: EngineSection, numerics: Numerics) -> None:
    if numerics.exact and not section.is_octavos:
        raise ConfigError(
            f"exact = true promises the trainer's bits, which engine.name={section.name!r} cannot give; set exact = "
            "false and correction.kind = 'token_tis', or engine.name = 'octavo-server'"
        )
    if numerics.has_known_kv_scales and not section.is_octavos:
        raise ConfigError(
            f"rollout.kv_scales={numerics.kv_scales!r} are scales of octavo's cache, and engine.name={section.name!r} "
            "keeps its own; leave rollout.kv_scales out, or set engine.name = 'octavo-server'"
        )


def _with_keys(section: EngineSection) -> EngineSection:
    """The section with the keys of the environment, where it has none of its own."""
    keys = {"api_key": section.api_key or api_key_from_env() or ""}
    keys["admin_key"] = section.admin_key or admin_key_from_env() or ""
    return section.model_copy(update=keys)
