"""The decoder: its initial weights, its names, its versions, its numerics, and its log-probabilities."""

import dataclasses
from pathlib import Path

import pytest
import torch

from octavo.errors import BackendError, ConfigError, DataError, DtypeError, RecipeError, ShapeError
from octavo.models import Decoder, ModelConfig, load_model, save_model, scoring, sequence_logprobs
from octavo.nn import Linear, PackedContext, autocast
from octavo.numerics import Numerics, get_recipe
from octavo.testing import assert_sqnr

SEQUENCES = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1] * 8, [95, 0]]


def test_initial_weights_follow_the_seed_alone(config: ModelConfig) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again, other = Decoder(config, seed=1), Decoder(config, seed=1), Decoder(config, seed=2)
    wide = Decoder(config, seed=1, dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    for name, param in first.named_parameters():
        assert torch.equal(param, again.get_parameter(name))
        assert torch.equal(param, wide.get_parameter(name).bfloat16())
        assert name.endswith("norm.weight") or not torch.equal(param, other.get_parameter(name))


def test_initial_weights_have_their_spread(config: ModelConfig) -> None:
    model = Decoder(dataclasses.replace(config, num_layers=8, vocab_size=512), dtype=torch.float32)
    for name, param in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (param == 1).all()
        else:
            expected = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert param.std().item() == pytest.approx(expected, rel=0.05)


def test_a_device_that_is_not_here_is_refused(tmp_path: Path, config: ModelConfig) -> None:
    save_model(load_model(config), tmp_path / "m")
    for source in (config, tmp_path / "m"):
        with pytest.raises(BackendError, match="there is no device 'cuda:99' here; leave device out"):
            load_model(source, device="cuda:99")
        for name in ("toaster", "mps", "meta"):
            with pytest.raises(ConfigError, match=f"device must be 'cpu', 'cuda' or 'cuda:N', got {name!r}"):
                load_model(source, device=name)


def test_versions_grow_with_every_commit(config: ModelConfig) -> None:
    model = load_model(config, recipe="blockwise")
    linear = model.get_submodule("layers.0.mlp.down_proj")
    assert isinstance(linear, Linear)
    before = linear.quantized_weight()[0]
    assert model.weight_version == 0
    with torch.no_grad():
        linear.weight.mul_(2)
    model.mark_weights_updated()
    assert model.weight_version == 1
    assert torch.equal(linear.quantized_weight()[0].scale, 2 * before.scale)
    model.load_state_dict(model.state_dict())
    assert model.weight_version == 2


def test_set_numerics_reaches_every_layer(config: ModelConfig) -> None:
    model = Decoder(config)
    numerics = Numerics(get_recipe("blockwise"), "fp8", exact=True)
    report = model.set_numerics(numerics, ignore=("layers.0.mlp.down_proj",))
    assert report is model.conversion_report
    assert {row.name for row in report.rows if row.recipe is None} == {"lm_head", "layers.0.mlp.down_proj"}
    assert model.layers[1].self_attn.qkv_proj.exact
    assert model.layers[1].self_attn.q_norm.exact
    assert model.norm.exact
    model.set_numerics(Numerics())
    assert not model.norm.exact
    assert model.layers[0].mlp.down_proj.recipe is None


def test_names_to_ignore_are_a_list(config: ModelConfig) -> None:
    model = load_model(config)
    with pytest.raises(RecipeError, match=r"got the string 'up_proj'; write ignore=\['up_proj'\]"):
        model.set_numerics(Numerics(get_recipe("blockwise")), ignore="up_proj")  # type: ignore[arg-type]


def test_a_high_precision_model_is_open_to_autocast(config: ModelConfig) -> None:
    model = load_model(config)
    plain = sequence_logprobs(model, SEQUENCES)[2]
    with autocast(recipe="rowwise"):
        cast = sequence_logprobs(model, SEQUENCES)[2]
    assert not torch.equal(plain, cast)
    assert torch.equal(cast, sequence_logprobs(load_model(config, recipe="rowwise"), SEQUENCES)[2])


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("numerics", [Numerics(), Numerics(exact=True), Numerics(get_recipe("rowwise"), exact=True)])
def test_no_tokens_give_gradients_of_zero(config: ModelConfig, numerics: Numerics, lengths: list[int]) -> None:
    """As a rank whose share of a batch is empty needs them."""
    model = Decoder(dataclasses.replace(config, tie_word_embeddings=True))
    model.set_numerics(numerics)
    context = PackedContext.from_lengths(lengths, model.numerics, model.device, model.kv_table)
    model(torch.zeros(0, dtype=torch.int64), context).sum().backward()
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())


def test_what_forward_refuses(config: ModelConfig) -> None:
    model = Decoder(config)
    context = PackedContext.from_lengths([3, 2])
    for error, text, shape, dtype, given in (
        (ShapeError, r"PackedContext\.from_lengths", 5, torch.int64, ()),
        (ShapeError, "packed", (2, 3), torch.int64, (context,)),
        (ShapeError, r"\(5,\)", 4, torch.int64, (context,)),
        (DtypeError, "int64", 5, torch.int32, (context,)),
    ):
        with pytest.raises(error, match=text):
            model(torch.zeros(shape, dtype=dtype), *given)
    with pytest.raises(DtypeError, match="float16"):
        Decoder(config, dtype=torch.float16)
    with pytest.raises(RecipeError, match="tensorwise"):
        load_model(config, recipe="tensorwise", exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequence_logprobs_are_log_softmax_of_the_logits(config: ModelConfig, dtype: torch.dtype) -> None:
    model = load_model(config, dtype=dtype)
    logprobs = sequence_logprobs(model, SEQUENCES, temperature=0.7)
    assert [len(x) for x in logprobs] == [4, 0, 71, 1]
    assert all(x.dtype == torch.float32 for x in logprobs)
    with torch.no_grad():
        for sequence, got in zip(SEQUENCES, logprobs, strict=True):
            hidden = model(torch.tensor(sequence), PackedContext.from_lengths([len(sequence)]))
            expected = torch.log_softmax(model.logits(hidden) / 0.7, dim=-1)[:-1]
            picked = expected.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
            torch.testing.assert_close(got, picked, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_prompts_are_left_out(config: ModelConfig, exact: bool) -> None:
    model = load_model(config, recipe="blockwise", kv_cache_dtype="fp8", exact=exact)
    prompt_lens = [2, 1, 40, 2]
    whole, own = sequence_logprobs(model, SEQUENCES), sequence_logprobs(model, SEQUENCES, prompt_lens=prompt_lens)
    expected = [logprobs[n - 1 :] for logprobs, n in zip(whole, prompt_lens, strict=True)]
    gradients = []
    for found in (expected, own):
        model.zero_grad()
        torch.cat(found).sum().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    for a, b in zip(own, expected, strict=True):
        # a library's products of other numbers of rows have other bits
        assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=1e-4)
    for a, b in zip(*gradients, strict=True):
        assert_sqnr(a, b, 40.0)


@pytest.mark.parametrize(
    ("num_wanted", "exact", "longest", "packed"),
    [
        (72, False, 256, [24, 24, 24]),
        (72, True, 256, [23, 18, 23, 8]),  # whose attention is no batch
        (73, False, 256, [23, 18, 23, 9]),  # no multiple of 3
        (66, False, 256, [23, 18, 23, 2]),  # 22 each: fewer than the longest has
        (75, False, 24, [23, 18, 23, 11]),  # 25 each: more than the model's context
    ],
)
@pytest.mark.parametrize("prompt_lens", [None, [4, 18, 1]], ids=["all", "responses"])
def test_padding_makes_sequences_equally_long_where_it_can(
    config: ModelConfig,
    num_wanted: int,
    exact: bool,
    longest: int,
    packed: list[int],
    prompt_lens: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = dataclasses.replace(config, max_position_embeddings=longest)
    model = load_model(config, recipe="blockwise", kv_cache_dtype="fp8", exact=exact)
    sequences = [[(7 * i + n) % 90 for i in range(n)] for n in (24, 19, 24)]
    found, lengths = [], list[list[int]]()
    context = PackedContext.from_lengths
    monkeypatch.setattr(PackedContext, "from_lengths", lambda x, *rest: (lengths.append(x), context(x, *rest))[1])
    for wanted in (64, num_wanted):
        monkeypatch.setattr(scoring, "_num_wanted", lambda model, num_tokens, wanted=wanted: wanted)
        model.zero_grad()
        logprobs = torch.cat(sequence_logprobs(model, sequences, prompt_lens=prompt_lens))
        logprobs.sum().backward()
        found.append((logprobs.detach(), [param.grad.clone() for param in model.parameters()]))
    assert lengths == [[23, 18, 23], packed]
    (plain, plain_grads), (padded, padded_grads) = found
    assert torch.equal(plain, padded) if exact else torch.allclose(plain, padded, atol=0.02)
    for a, b in zip(plain_grads, padded_grads, strict=True):
        assert_sqnr(a, b, 25.0)


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_scoring_and_its_backward_wait_for_no_gpu(config: ModelConfig, exact: bool) -> None:
    model = load_model(config, recipe="blockwise", kv_cache_dtype="fp8", exact=exact, device="cuda")
    prompt_lens = [2, 1, 40, 2]

    def learn() -> torch.Tensor:
        logprobs = torch.cat(sequence_logprobs(model, SEQUENCES, prompt_lens=prompt_lens))
        logprobs.sum().backward()
        return logprobs.detach()

    learn()  # compiles, and checks each shape's first exact product
    expected = learn()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = learn()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_prompts_alone_have_nothing_to_score(config: ModelConfig, exact: bool) -> None:
    model = load_model(config, exact=exact)
    scored = sequence_logprobs(model, SEQUENCES, prompt_lens=[len(ids) for ids in SEQUENCES])
    assert [len(x) for x in scored] == [0] * len(SEQUENCES)
    torch.cat(scored).sum().backward()


@pytest.mark.parametrize("prompt_lens", [[1], [0, 1, 1, 1], [6, 1, 1, 1]], ids=str)
def test_prompts_that_cannot_be(config: ModelConfig, prompt_lens: list[int]) -> None:
    with pytest.raises(ShapeError, match="prompt_lens"):
        sequence_logprobs(load_model(config), SEQUENCES, prompt_lens=prompt_lens)


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "blockwise"])
def test_exact_logprobs_do_not_depend_on_the_batch(ragged_config: ModelConfig, recipe: str) -> None:
    model = load_model(ragged_config, recipe=recipe, kv_cache_dtype="fp8", exact=True)
    together = sequence_logprobs(model, SEQUENCES, temperature=0.9)
    for sequence, expected in zip(SEQUENCES, together, strict=True):
        assert torch.equal(sequence_logprobs(model, [sequence], temperature=0.9)[0], expected)


def test_checkpoints_and_scores_on_every_device(tmp_path: Path, config: ModelConfig, device: torch.device) -> None:
    model = load_model(config, recipe="blockwise", kv_cache_dtype="fp8", device=device)
    save_model(model, tmp_path / "m", "fp8-block")
    loaded = load_model(tmp_path / "m", recipe="blockwise", kv_cache_dtype="fp8", device=device)
    reference = load_model(tmp_path / "m", recipe="blockwise", kv_cache_dtype="fp8")
    assert loaded.device.type == device.type
    for name in reference.conversion_report.fp8_names:
        for a, b in zip(*(m.get_submodule(name).quantized_weight() for m in (loaded, reference)), strict=True):
            assert a.device.type == device.type
            assert torch.equal(a.qdata.cpu().view(torch.uint8), b.qdata.view(torch.uint8))
            assert torch.equal(a.scale.cpu(), b.scale)
    with torch.no_grad():
        here, there = (torch.cat(sequence_logprobs(m, SEQUENCES)) for m in (loaded, reference))
    assert here.device.type == device.type
    # Codes are equal, products are not: logprobs of about -4.6 after two layers in bf16.
    torch.testing.assert_close(here.cpu(), there, atol=0.05, rtol=0)


def test_a_path_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sequence_logprobs takes a model, got 'm'; octavo\.load_model\(path\)"):
        sequence_logprobs("m", [[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="save_model takes a model, got 'm'"):
        save_model("m", tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="save_model writes octavo's own models, got a Sequential; save it as you do"):
        save_model(torch.nn.Sequential(), tmp_path / "out")  # type: ignore[arg-type]


def test_what_scoring_refuses(config: ModelConfig) -> None:
    model = load_model(config)
    assert [len(x) for x in sequence_logprobs(model, [[1], [2]])] == [0, 0]
    assert sequence_logprobs(model, []) == []
    with pytest.raises(ShapeError, match="sequence 1 has 0 tokens"):
        sequence_logprobs(model, [[1, 2], []])
    with pytest.raises(ShapeError, match="129 tokens"):
        sequence_logprobs(model, [[1] * 129])
    with pytest.raises(DataError, match="96"):
        sequence_logprobs(model, [[1, 96]])
    with pytest.raises(DataError, match="temperature"):
        sequence_logprobs(model, [[1, 2]], temperature=0.0)
    flat = torch.tensor([1, 2, 3])
    for sequences in ([1, 2, 3], flat, flat.numpy(), "abc", ["abc"], [flat[None]]):
        with pytest.raises(DataError, match=r"sequence 0 must be a list .*; a single sequence is given as \[\["):
            sequence_logprobs(model, sequences)
    from_tensors = sequence_logprobs(model, [flat, flat.numpy()])
    assert all(torch.equal(found, sequence_logprobs(model, [[1, 2, 3]])[0]) for found in from_tensors)
