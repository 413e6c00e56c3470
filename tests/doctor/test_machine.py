"""The machine's checks and the command: what is said, exit codes, and recipes that the hardware lacks."""

import json
import os

import pytest
import torch

from octavo import env
from octavo.doctor import check_machine, check_recipes, machine, open_model_under_test, recipes
from octavo.doctor.recipes import require_here
from octavo.errors import BackendError, ConfigError, RecipeError
from octavo.models import Decoder, ModelConfig, load_model, save_model, train_bpe
from octavo.numerics.recipe import RECIPE_NAMES
from octavo.ops._runtime.recipe_support import support_by_capability
from octavo.run.busy_cpu import threads_advice

CPU = torch.device("cpu")


@pytest.fixture
def doctor(run_octavo):
    """doctor(argument, ...) runs the command in this process: (exit code, what it printed)."""

    def run(*arguments):
        ended = run_octavo("doctor", "--device", "cpu", *arguments)
        return ended.code, ended.out + ended.err

    return run


@pytest.fixture
def quick(monkeypatch):
    """Neither the compiler nor every recipe again: their own tests run them."""
    monkeypatch.setattr(machine, "_compile_kernel", lambda: "compiles")
    monkeypatch.setattr(recipes, "_measure", lambda name, device: 50.0)


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = train_bpe(["to be or not to be, that is the question\n" * 20], 300)
    model = Decoder(ModelConfig("llama", tokenizer.vocab_size, 128, 256, 2, 4, 2, 32, max_position_embeddings=64))

    def save(spoil=None):
        if spoil is not None:
            spoil(model)
        save_model(model, tmp_path / "model", tokenizer=tokenizer)
        return str(tmp_path / "model")

    return save


def test_every_recipe_of_this_machine_works(device):
    found = check_recipes(device)
    assert [check.name for check in found] == list(RECIPE_NAMES)
    assert all(not check.problem for check in found if check.support.how != "none"), found
    assert {c.support.how for c in found} <= {"native", "emulated", "none"}


def test_the_machine_is_well(device):
    checks = {check.name: check for check in check_machine(device)}
    assert all(check.status != "fail" for check in checks.values()), checks
    assert torch.__version__ in checks["torch"].text
    assert "bits" in checks["triton"].text or "compiles for Hopper" in checks["triton"].text


def test_a_recipe_that_does_not_work_is_a_problem(monkeypatch):
    def broken(name, device):
        if name == "rowwise":
            raise RuntimeError("cuBLAS said no\nand more")
        return 3.0 if name == "blockwise" else 50.0

    monkeypatch.setattr(recipes, "_measure", broken)
    problems = {check.name: check.problem for check in check_recipes(CPU) if check.problem}
    assert problems == {
        "rowwise": "RuntimeError: cuBLAS said no ... and more",
        "blockwise": "its GEMMs keep 3.0 dB, 20 expected",
    }


def test_a_compiler_that_fails_is_told(monkeypatch):
    def broken():
        raise OSError("ptxas: not found")

    monkeypatch.setattr(machine, "_compile_kernel", broken)
    check = next(check for check in check_machine(CPU) if check.name == "triton")
    assert check.status == "note" and "OSError: ptxas: not found" in check.text


def test_a_cache_that_cannot_be_written_is_a_failure(monkeypatch, tmp_path, quick, doctor):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out = doctor()
    assert code == 1
    assert "fail  kernel cache" in out and "set TRITON_CACHE_DIR" in out
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert env.triton_cache_dir() == tmp_path / ".triton" / "cache"


def test_the_command_prints_json(quick, doctor):
    code, out = doctor("--json")
    report = json.loads(out)
    assert code == 0 and report["ok"] is True and report["departure"] is None
    assert [entry["recipe"] for entry in report["recipes"]] == list(RECIPE_NAMES)
    assert {entry["name"] for entry in report["machine"]} >= {"torch", "CPU", "triton", "kernel cache"}


def test_a_recipe_alone_is_tried_on_a_small_model(quick, doctor):
    code, out = doctor("rowwise", "--tokens", "32")
    assert code == 0, out
    assert "layers.1.mlp.down_proj" in out and "first departs" not in out


def test_a_sound_checkpoint_reads_a_text(quick, checkpoint, doctor):
    path = checkpoint()
    code, out = doctor(path, "--text", "to be or not to be " * 9, "--recipe", "tensorwise", "--json")
    report = json.loads(out)
    assert code == 0, report["departure"]["verdict"]
    assert report["departure"]["first"] is None and report["departure"]["recipe"] == "tensorwise"
    code, out = doctor(path, "--text", "")
    assert code == 2 and "a loss needs two" in out
    code, out = doctor(path, "--tokens", "32", "--threshold", "1")
    assert code == 0 and out.splitlines()[-1].strip() == "all is well"
    assert "in FP8: recipe 'blockwise', whatever the model was trained with" in out


def test_an_fp8_checkpoint_is_sound_though_errors_add_up(quick, checkpoint, tmp_path, doctor):
    """Warnings are errors in the tests: what loading warns of is a plain line here."""
    save_model(load_model(checkpoint(), recipe="blockwise"), tmp_path / "fp8", "fp8-block")
    code, out = doctor(str(tmp_path / "fp8"), "--tokens", "48", "--threshold", "26")
    assert code == 0, out
    assert "note: 6 FP8 weights were decoded to torch.bfloat16: gradients need parameters\n" in out
    said = "all is well: no layer is at fault. That errors add up beyond 26 dB, 5% of a tensor's magnitude, is usual"
    assert said in out


def test_a_spoiled_checkpoint_is_named_and_exits_with_1(quick, checkpoint, doctor):
    def spoil(model):
        with torch.no_grad():
            model.layers[1].self_attn.o_proj.weight[::64, ::32] = 3e6

    code, out = doctor(checkpoint(spoil), "--tokens", "48")
    assert code == 1
    assert "first departs from bf16 in layer layers.1.self_attn.o_proj, operand weight" in " ".join(out.split())
    assert out.splitlines()[-1].strip() == "not well: layer layers.1.self_attn.o_proj"


def test_a_training_run_is_examined_on_its_first_batch(quick, tmp_path, doctor):
    text, held_out = tmp_path / "text.txt", tmp_path / "held_out.txt"
    held_out.write_text("another line of some text to learn from\n" * 9)
    text.write_text("\n".join(f"line {i} of some text to learn from" for i in range(400)))
    config = tmp_path / "run.toml"
    config.write_text(
        "[model]\nhidden_size = 64\nintermediate_size = 128\nnum_hidden_layers = 1\nnum_attention_heads = 2\n"
        "num_key_value_heads = 1\n"
        f'[data]\npath = "{text}"\nvalidation_path = "{held_out}"\nvocab_size = 300\nseq_len = 32\nbatch_size = 2\n'
        f'cache_dir = "{tmp_path / "cache"}"\n'
        '[precision]\nrecipe = "rowwise"\n[run]\nsteps = 30\n'
    )
    code, out = doctor(str(config), "--set", "precision.recipe=tensorwise", "--json")
    report = json.loads(out)["departure"]
    assert code == (report["first"] is not None)
    assert report["recipe"] == "tensorwise"
    assert {row["layer"].split(".")[1] for row in report["rows"]} == {"0"}


def test_a_recipe_that_the_hardware_lacks(monkeypatch, quick, doctor):
    monkeypatch.setattr(recipes, "recipe_support", lambda device: support_by_capability((8, 9), (13, 0)))
    with pytest.raises(BackendError, match=r"'blockwise'.*it has bf16, .*rowwise.*; emulated: mxfp8"):
        require_here("blockwise", CPU)
    code, out = doctor("blockwise")
    assert code == 2 and "the libraries' 128-wide block GEMM is Hopper's" in " ".join(out.split())
    assert require_here("rowwise", CPU).how == "native"


def test_bad_input(quick, doctor):
    with pytest.raises(RecipeError, match="unknown recipe 'blockwize'"):
        require_here("blockwize", CPU)
    code, out = doctor("blockwize")
    assert code == 2 and "is no checkpoint directory, no TOML file and no recipe" in " ".join(out.split())
    for asked in ("--recipe blockwize", "--text abc", "--tokens 9", "--threshold 20", "--set run.steps=1"):
        code, out = doctor(*asked.split())
        assert code == 2 and "go with a MODEL" in " ".join(out.split())
    for asked, said in (
        ("rowwise --threshold nan", "--threshold must be a finite number of dB, got nan"),
        ("rowwise --recipe blockwise", "--recipe blockwise another"),
        ("rowwise --text abc", "--text goes with a checkpoint"),
        ("train.toml --text abc", "--text goes with a checkpoint"),
        ("rowwise --set run.steps=1", "--set sets keys of a TOML file"),
    ):
        code, out = doctor(*asked.split())
        assert code == 2 and said in " ".join(out.split()), asked
    for asked in ("bf16", "rowwise --recipe bf16"):
        code, out = doctor(*asked.split())
        assert code == 2 and "bf16 is what FP8 is compared with; name one of delayed, " in " ".join(out.split())
    code, out = doctor("--device", "tpu")
    assert code == 2 and "--device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'" in " ".join(out.split())
    with pytest.raises(ConfigError, match=r"no-such-run\.toml"):
        open_model_under_test("no-such-run.toml", CPU)


@pytest.mark.parametrize(
    ("num_cores", "load", "num_threads", "advice"),
    [(2, 3.0, 2, "1"), (2, 0.1, 2, ""), (2, 3.0, 1, ""), (64, 1.0, 32, ""), (64, 40.2, 32, "24")],
)
def test_threads_that_wait_on_busy_cores_are_said(num_cores, load, num_threads, advice, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(torch.version, "cuda", None)
    check = next(check for check in check_machine(CPU) if check.name == "CPU")
    assert check.text.partition("set OMP_NUM_THREADS=")[2] == advice
    assert threads_advice(torch.device("cuda")) == ""
