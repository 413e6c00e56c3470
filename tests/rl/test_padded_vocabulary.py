"""Ids beyond the tokenizer's: masked on both sides with equal bits, or drawn, and then no run ends by them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models import Decoder, ModelConfig, Tokenizer, char_tokenizer, save_model, sequence_logprobs
from octavo.rl import loop
from octavo.rl.config import RLConfig
from octavo.rl.policy import build_policy
from octavo.rl.transcripts import TRANSCRIPTS_FILE, read_transcripts
from octavo.run.checkpoint_store import CheckpointStore
from octavo.serve import LLM, SamplingParams
from tests.rl.conftest import tiny_config
from tests.rl.test_loop import EASY, run

NUM_PADDED = 20


@pytest.fixture
def tokenizer() -> Tokenizer:
    return char_tokenizer(EASY.alphabet)


def make_padded(tokenizer: Tokenizer, *, tied: bool = True, eos_id: int = 0) -> Decoder:
    """A policy that has not learned yet to draw no ids without a token."""
    fields = {"qk_norm": True, "tie_word_embeddings": tied, "eos_token_ids": (eos_id,)}
    vocab_size = tokenizer.vocab_size + NUM_PADDED
    config = ModelConfig("qwen3", vocab_size, 32, 64, 1, 2, 1, 16, max_position_embeddings=64, **fields)  # type: ignore[arg-type]
    return Decoder(config, seed=1)


def padded_rows(model: Decoder, tokenizer: Tokenizer) -> torch.Tensor:
    return model.head_weight[tokenizer.vocab_size :].detach().clone()


def drawn(result: loop.RLResult) -> set[int]:
    rollouts = result.last_rollouts
    return {i for ids, n in zip(rollouts.sequences, rollouts.prompt_lens, strict=True) for i in ids[n:]}


VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "tis": {"exact": False, "rollout": {"recipe": "rowwise"}, "correction": {"kind": "token_tis"}},
    "asynchronous": {"exact": False, "correction": {"kind": "token_tis"}, "asynchronous": {"max_policy_lag": 1}},
}


def variant(directory: Path, name: str, **rollout: Any) -> RLConfig:
    sections = dict(VARIANTS[name])
    return tiny_config(directory, **sections | {"rollout": {**sections.get("rollout", {}), **rollout}})


@pytest.mark.parametrize(("name", "tied"), [("exact", True), ("exact", False), ("tis", False), ("asynchronous", False)])
def test_masked_ids_are_never_drawn_and_never_trained(
    tmp_path: Path, tokenizer: Tokenizer, name: str, tied: bool
) -> None:
    padded = make_padded(tokenizer, tied=tied)
    rows = padded_rows(padded, tokenizer)
    result = run(variant(tmp_path, name), model=padded, tokenizer=tokenizer)
    assert len(result.history) == 3
    assert max(drawn(result)) < tokenizer.vocab_size
    assert torch.equal(padded_rows(padded, tokenizer), rows)  # their gradient is 0, not merely small
    differences = [row["mismatch/logprob_abs_diff_max"] for row in result.history]
    if name == "exact":
        assert differences == [0.0] * 3
    # asynchronous rollouts are of older weights; the others' numerics are close
    assert name == "asynchronous" or max(differences) < 0.2


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_outlives_ids_without_a_token(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    padded = make_padded(tokenizer, tied=False)
    result = run(variant(tmp_path, name, mask_padded_ids=False), model=padded, tokenizer=tokenizer)
    assert len(result.history) == 3
    assert max(drawn(result)) >= tokenizer.vocab_size
    assert name != "exact" or all(row["mismatch/logprob_abs_diff_max"] == 0.0 for row in result.history)
    assert read_transcripts(tmp_path / TRANSCRIPTS_FILE)
    assert (tmp_path / "report.html").is_file()


@torch.no_grad()
@pytest.mark.parametrize("exact", [True, False])
def test_logprobs_are_of_the_ids_that_are_left(tokenizer: Tokenizer, exact: bool) -> None:
    model = make_padded(tokenizer)
    n = tokenizer.vocab_size
    model.set_numerics(RLConfig(exact=exact, trainer={"recipe": "bf16"}).trainer_numerics)  # type: ignore[arg-type]
    sequences = [[1, token] for token in range(n)]
    before = torch.cat(sequence_logprobs(model, sequences)).double().exp()
    assert model.mask_padded_ids(n) == NUM_PADDED
    after = torch.cat(sequence_logprobs(model, sequences)).double().exp()
    assert float(before.sum()) < 0.9
    torch.testing.assert_close(after, before / before.sum(), rtol=1e-5, atol=0.0)
    sampled = LLM(model, tokenizer=tokenizer).generate([[1]] * 64, SamplingParams(max_tokens=1, logprobs=20))
    for output in sampled:
        (token,) = output.outputs[0].token_ids
        assert output.outputs[0].logprobs is not None
        reported = output.outputs[0].logprobs[0][token].logprob
        scored = float(sequence_logprobs(model, [[1, token]])[0])
        assert reported == scored if exact else reported == pytest.approx(scored, abs=1e-5)


def test_the_mask_is_no_part_of_a_checkpoint(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A run over a padded checkpoint is resumed with its bits, and what it saves is an ordinary model."""
    save_model(make_padded(tokenizer), tmp_path / "start", tokenizer=tokenizer)

    def part(name: str, steps: int) -> loop.RLResult:
        sections = {"trainer": {"steps": steps}, "run": {"checkpoint_every": 1, "save": True}}
        config = tiny_config(tmp_path / name, model={"path": str(tmp_path / "start")}, **sections)
        model, _ = build_policy(config, EASY)
        assert "logit_mask" not in model.state_dict() and model.logit_mask is not None
        return run(config)

    whole = part("whole", 3)
    part("halves", 1)
    again = part("halves", 3)
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    found = CheckpointStore(tmp_path / "halves" / "checkpoints").find_latest()
    assert found is not None and not any("logit_mask" in name for name in found.load_state())


def test_an_engine_elsewhere_has_no_mask_and_says_so(tokenizer: Tokenizer) -> None:
    config = RLConfig(exact=False, engine={"name": "octavo-server", "url": "http://127.0.0.1:1", "admin_key": "k"})  # type: ignore[arg-type]
    model = make_padded(tokenizer)
    said = loop.mask_padded_ids(config, model, tokenizer)
    assert f"{NUM_PADDED} ids beyond the tokenizer's" in said and "may be sampled" in said
    assert model.logit_mask is None


def test_an_id_that_ends_a_sequence_stays(tokenizer: Tokenizer) -> None:
    model = make_padded(tokenizer, eos_id=tokenizer.vocab_size + 3)
    assert model.mask_padded_ids(tokenizer.vocab_size) == NUM_PADDED - 1
    assert model.logit_mask is not None and model.logit_mask[tokenizer.vocab_size + 3] == 0.0


def test_a_vocabulary_without_padding_is_left_alone(tokenizer: Tokenizer) -> None:
    model = make_padded(tokenizer)
    assert model.mask_padded_ids(model.config.vocab_size) == 0
    assert model.logit_mask is None and model.head_bias is None
