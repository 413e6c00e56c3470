"""octavo inside Lightning's Trainer: the bits of plain torch, checkpoints, averages of weights, kills, refusals."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo
from octavo.errors import BackendError, CheckpointError, ConfigError, StaleCodesError
from octavo.testing import assert_bitwise
from tests.ecosystem.cases import cases
from tests.ecosystem.launched import ROOT, finish, import_again, kill_a_rank, launch, losses
from tests.ecosystem.plain_run import Case, batches, build, loss_of
from tests.ranks import run_ranks

lightning = pytest.importorskip("lightning", reason="needs ecosystem/lightning.txt")

from lightning.pytorch.callbacks import WeightAveraging  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

from octavo.integrations.lightning import OctavoPrecision  # noqa: E402
from tests.ecosystem.lightning_ranks import (  # noqa: E402
    Module,
    WeightsOfValidation,
    compare,
    in_bf16,
    together,
    trainer_of,
)

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]
EXAMPLE = ROOT / "examples" / "lightning" / "train.py"
BLOCKWISE, DELAYED = (Case(0, recipe, "fp32", 1) for recipe in ("blockwise", "delayed"))

# Stage 3 is FSDP2 by ModelParallelStrategy: as ZeRO-3 it sums over the ranks for each micro-batch.
KINDS: list[dict[str, Any]] = [{"stage": stage, "dtype": "fp32"} for stage in (0, 3)]
ALONE = cases(1, Case, KINDS[0])
TOGETHER = [
    *cases(2, Case, *KINDS),
    Case(3, "blockwise", "fp32", 4),
    Case(3, "delayed-step", "fp32", 1, resumed=True),
]


@pytest.mark.parametrize("case", ALONE, ids=map(str, ALONE))
def test_one_process_has_the_bits_of_plain_torch(case: Case, tmp_path: Path) -> None:
    ((mine, theirs, other_weights),) = compare(0, 1, [case], tmp_path)
    assert mine == theirs
    assert not other_weights
    assert mine[-1] < mine[0]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(together, 2, TOGETHER, str(tmp_path_factory.mktemp("together")))


@pytest.mark.parametrize("index", range(len(TOGETHER)), ids=map(str, TOGETHER))
def test_two_ranks_have_the_bits_of_plain_torch(index: int, of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        mine, theirs, other_weights = results["cases"][index]
        assert mine == theirs
        assert not other_weights
    first, second = (results["cases"][index][0] for results in of_two_ranks)
    assert first != second, "each rank has inputs of its own"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("buffers", r"ConfigError: under delayed scaling .*strategy=DDPStrategy\(broadcast_buffers=False\)"),
        ("sharded before convert", "ConfigError: .*is sharded already .*call octavo.convert first, then .*fully_shard"),
    ],
)
def test_a_mistake_of_several_ranks_is_said_in_one_line(mistake: str, words: str, of_two_ranks: list[Any]) -> None:
    for results in of_two_ranks:
        assert re.match(words, results["said"][mistake])


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_the_rest_runs_in_bf16(precision: str, tmp_path: Path) -> None:
    mine, theirs = in_bf16(precision, BLOCKWISE, tmp_path)
    assert mine == theirs
    assert mine != in_bf16("32-true", BLOCKWISE, tmp_path)[0]


def test_codes_follow_an_average_of_weights_that_torch_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def averaged() -> tuple[Module, dict[str, torch.Tensor]]:
        module, seen = Module(BLOCKWISE), WeightsOfValidation()
        callbacks = [seen, WeightAveraging()]
        trainer_of(BLOCKWISE, tmp_path, limit_val_batches=2, callbacks=callbacks).fit(module)
        return module, seen.weights

    module, weights = averaged()
    model = build(BLOCKWISE, seed=5)
    model.load_state_dict(weights)
    with torch.no_grad():
        assert module.val_losses[-2:] == [loss_of(model, ids).item() for ids in batches(BLOCKWISE, 0)[:2]]
    monkeypatch.setattr(octavo.nn, "mark_weights_updated", lambda model: None)
    with pytest.raises(StaleCodesError):
        averaged()


def test_a_checkpoint_is_lightnings_own_and_its_codes_are_those_of_its_weights(tmp_path: Path) -> None:
    module, path = Module(DELAYED), tmp_path / "saved.ckpt"
    trainer = trainer_of(DELAYED, tmp_path, max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert list(checkpoint["state_dict"]) == list(Module(DELAYED).state_dict())
    assert checkpoint["OctavoPrecision"]

    plain = Module(DELAYED, seed=9)
    trainer_of(DELAYED, tmp_path, plugins=[]).fit(plain, ckpt_path=path)
    assert not any(isinstance(one, octavo.nn.Linear) for one in plain.modules())
    assert len(plain.losses) == 10, "a Trainer without octavo goes on"

    exported = {name: weight.bfloat16() for name, weight in checkpoint["state_dict"].items()}
    plain.bfloat16().load_state_dict(exported)
    octavo.convert(plain, "blockwise")
    for name in ("model.layers.1", "model.layers.3"):
        (codes,) = plain.get_submodule(name).quantized_weight()
        wanted = octavo.quantize(exported[f"{name}.weight"], octavo.get_recipe("blockwise").weight)
        assert_bitwise(codes.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))
        assert_bitwise(codes.scale, wanted.scale)


def test_a_checkpoint_without_state_is_for_recipes_without_it(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    trainer = trainer_of(BLOCKWISE, tmp_path, max_epochs=1)
    trainer.fit(Module(BLOCKWISE))
    trainer.save_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"no state of delayed scaling; .* give it fp8_state=False"):
        trainer_of(DELAYED, tmp_path).fit(Module(DELAYED), ckpt_path=path)
    module = Module(DELAYED)
    fresh = OctavoPrecision("delayed", ignore=(), fp8_state=False)
    trainer_of(DELAYED, tmp_path, plugins=[fresh]).fit(module, ckpt_path=path)
    assert len(module.losses) == 10


def test_a_second_fit_keeps_the_amaxes(tmp_path: Path) -> None:
    """Lightning has the plug-in convert the module again: nothing of it may change."""
    module = Module(DELAYED)
    trainer = trainer_of(DELAYED, tmp_path, max_epochs=1)
    trainer.fit(module)
    state = {name: tensor.clone() for name, tensor in octavo.nn.fp8_state_dict(module).items()}
    trainer.validate(module, verbose=False)
    assert state and all(torch.equal(tensor, state[key]) for key, tensor in octavo.nn.fp8_state_dict(module).items())


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="32-true, bf16-true, bf16-mixed, got precision='16-mixed'; take one"):
        OctavoPrecision(precision="16-mixed")
    module = Module(BLOCKWISE)
    module.other = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})(16, 16)
    with pytest.raises(ConfigError, match=r"one FP8 backend, got octavo's .* and TransformerEngine \(other, a Linear"):
        trainer_of(BLOCKWISE, tmp_path).fit(module)
    with pytest.raises(Exception, match=r"both `precision=transformer-engine` and `plugins=.*OctavoPrecision"):
        trainer_of(BLOCKWISE, tmp_path, precision="transformer-engine")
    with pytest.raises(TypeError, match=r"FSDP strategy can only work with the `FSDPPrecision`"):
        FSDPStrategy().precision_plugin = OctavoPrecision()


@pytest.mark.parametrize(("version", "words"), [("2.5.0", "too old"), (None, "not installed")])
def test_another_lightning_is_refused(version: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=rf"octavo.integrations.lightning: lightning .*{words}; .*lightning 2\.6\.6"):
        import_again("lightning", "lightning.pytorch.plugins.precision", version, monkeypatch)


def test_a_newer_lightning_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"lightning 2\.7\.0 is newer than what octavo was tested with"):
        import_again("lightning", "lightning.pytorch.plugins.precision", "2.7.0", monkeypatch)


def test_a_killed_rank_ends_the_run_which_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options = ("--accelerator", "cpu", "--devices", "2", "--recipe", "delayed")
    finish(launch(EXAMPLE, *options, "--folder", tmp_path / "whole", "--epochs", "3"))
    whole = losses(tmp_path / "whole")
    assert list(whole) == list(range(1, 13))

    folder = tmp_path / "killed"
    run = launch(EXAMPLE, *options, "--folder", folder, "--epochs", "1000000")
    kill_a_rank(run, lambda: len(losses(folder)) > 5)
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert saved >= 4
    epochs = max(3, saved // 4 + 1)
    (folder / "losses.txt").write_text("".join(f"{step} {losses(folder)[step]}\n" for step in range(1, saved + 1)))
    finish(launch(EXAMPLE, *options, "--folder", folder, "--epochs", str(epochs)))
    assert list(losses(folder)) == list(range(1, 4 * epochs + 1))
    assert {step: losses(folder)[step] for step in whole} == whole

    class_of = runpy.run_path(str(EXAMPLE))["NextToken"]
    exported = torch.load(tmp_path / "whole" / "model.ckpt", weights_only=True)["state_dict"]
    class_of(tmp_path).load_state_dict(exported)
