"""One job of the learning matrix in a process of its own: `python -m bench.rl_matrix.run JOB.json SECONDS`.

A warm start leaves a checkpoint; a run leaves metrics.jsonl, row by row, and checkpoints from which the same job goes
on; end.json says that a job is done, and how it ended.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.record import Record
from bench.rl_matrix.jobs import MatrixJob
from octavo.errors import ExactnessError, HealthError, NonFiniteError
from octavo.models import save_model
from octavo.rl import checkpoint, run
from octavo.rl.config import RLConfig
from octavo.rl.policy import build_evaluator, warm_start
from octavo.rl.progress import RLProgress
from octavo.run.atomic import write_atomic

SETUP_S = 60.0  # for imports, engines and the first evaluation before a run's first step, and the last ones after it
LEAST_S = 90.0  # no process is begun for less
ABOUT_FILE = "about.json"


def main(arguments: list[str] | None = None) -> int:
    """Do the job, or as much of it as the time allows."""
    path, seconds = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(1)
    print(execute(MatrixJob.load(Path(path)), float(seconds)), flush=True)
    return 0


def execute(job: MatrixJob, seconds: float) -> str:
    """Do a job within so many seconds.

    Returns:
        What became of it: "finished", "waiting" for another command, or "failed" by an error of its numbers.
    """
    config = job.config
    about = {**_measured_on(job), "config": config.model_dump(mode="json")}
    write_atomic(job.folder / ABOUT_FILE, json.dumps(about, indent=1) + "\n")
    if job.is_start:
        end: dict[str, Any] | None = _make_start(job, config)
    else:
        limit = max(seconds - SETUP_S, 1e-3)  # 0 would be none
        config = config.model_copy(update={"run": config.run.model_copy(update={"max_seconds": limit})})
        end = _run(config)
    if end is None:
        return "waiting"
    write_atomic(job.end_file, json.dumps(end, indent=1) + "\n")
    return "failed" if end.get("error") else "finished"


def _make_start(job: MatrixJob, config: RLConfig) -> dict[str, Any]:
    began = time.monotonic()
    task = config.task.build()
    model, tokenizer, steps = warm_start(config, task=task, progress=RLProgress(enabled=True))
    heldout = task.prompts("heldout", config.eval.num_prompts, 0)
    reward = build_evaluator(config, model, tokenizer, task).mean_reward(heldout)
    save_model(model, job.folder / "model", tokenizer=tokenizer)
    return {
        "accuracy": reward,
        "sampled": next((step.reward for step in reversed(steps) if step.reward is not None), None),
        "steps": len(steps),
        "num_params": sum(param.numel() for param in model.parameters()),
        "seconds": time.monotonic() - began,
    }


def _run(config: RLConfig) -> dict[str, Any] | None:
    """Reinforce; None where steps are left to do."""
    store = checkpoint.open_store(config)
    found = store.find_latest()
    if found is None or found.step < config.trainer.steps:
        try:
            run(config, progress=True)
        except (NonFiniteError, ExactnessError, HealthError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        found = store.find_latest()
    assert found is not None, "a run writes a checkpoint after its last step"
    if found.step < config.trainer.steps:
        return None
    names = {"accuracy_before": "heldout_reward_before", "accuracy": "heldout_reward"}  # as older files have them
    return {name: found.description[names.get(name, name)] for name in ("step", *names, "seconds")}


def _measured_on(job: MatrixJob) -> dict[str, Any]:
    device = "cuda" if job.device.startswith("cuda") else "cpu"
    document = Record("", "", device=device).document(job.commit)
    fields = job.as_dict()
    del fields["work"]
    return fields | {key: document[key] for key in ("device", "torch", "triton", "commit", "date")}


if __name__ == "__main__":
    sys.exit(main())
