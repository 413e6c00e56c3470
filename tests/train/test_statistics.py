"""A run's statistics on disk: rows, tags, what a resume keeps, and nothing where they are off."""

import torch

from octavo import nn
from octavo.nn.statistics import FP8_STATS
from octavo.train.statistics import STATISTICS_FILE, RunStatistics, read_statistics


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    nn.convert(model, "rowwise")
    return model


def run(directory, steps, done=0, **options):
    model = make_model()
    with RunStatistics(model, directory, done, **options) as statistics:
        for _ in range(steps):
            model(torch.randn(4, 32)).sum().backward()
            statistics.step()
            with torch.no_grad():
                model(torch.full((4, 32), 1e9))  # a validation, which is not the step's
    return model


def test_rows_and_resume(tmp_path):
    run(tmp_path, 6, every=2, tensorboard=False)
    rows = read_statistics(tmp_path / STATISTICS_FILE)
    assert [row["step"] for row in rows if (row["layer"], row["tensor"]) == ("1", "weight")] == [2, 4, 6]
    assert set(FP8_STATS) < set(rows[0])
    assert all(row["cur_amax"] < 1e6 for row in rows)
    path = tmp_path / STATISTICS_FILE
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote
    run(tmp_path, 2, done=3, every=1, layers=("0",), tensors=("activation",), stats=("mse",), tensorboard=False)
    rows = read_statistics(path)
    assert [row["step"] for row in rows if row["tensor"] == "activation" and row["layer"] == "0"] == [2, 4, 5]
    assert rows[-1].keys() == {"step", "layer", "tensor", "mse"}


def test_tensorboard_has_transformer_engines_tags(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, 3, every=1, end_step=3, layers=("1",))
    events = EventAccumulator(str(tmp_path / "tensorboard" / "statistics"))
    events.Reload()
    assert "1_activation_underflows%" in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("1_gradient_scale_inv_max")] == [1, 2]


def test_off_is_off(tmp_path):
    model = run(tmp_path / "run", 2)
    assert not (tmp_path / "run").exists()
    assert model[0].observer is None
