"""Where an engine's steps spend their time: `python -m bench.speed.engine_profile --variant fp8-kv --num-seqs 512`.

Random weights in a real shape. Some steps of prompts and some of single tokens are profiled; for each kind the table
has the wall time of a step, the time that the device was busy, and the kernels that took most of it. No record: this is
for finding what to speed up, `octavo bench serve` measures what came of it.
"""

import argparse
import dataclasses
import random
import sys
import time

import torch

from bench.serve.shapes import SHAPES, build_model, make_toy
from bench.serve.workloads import VARIANTS
from octavo.serve import LLM, SamplingParams
from octavo.serve.engine import Engine
from octavo.serve.engine.request import RequestState
from octavo.serve.model_choice import FP8_RECIPE


@dataclasses.dataclass
class Profile:
    """Steps of one kind: how many, seconds of wall time, and of each kernel by name [calls, microseconds]."""

    kind: str
    num_steps: int = 0
    seconds: float = 0.0
    kernels: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        return sum(us for _, us in self.kernels.values()) / 1e6

    def format(self, num_rows: int) -> str:
        """For people."""
        if not self.num_steps:
            return f"{self.kind}: no such step"
        per_step = 1e3 / self.num_steps
        head = f"{self.kind}: {self.seconds * per_step:.3f} ms a step, device busy {self.busy_s * per_step:.3f} ms"
        rows = sorted(self.kernels.items(), key=lambda item: -item[1][1])[:num_rows]
        lines = [
            f"  {us / 1e3 / self.num_steps:9.3f} ms {calls / self.num_steps:8.1f} x {us / calls:9.1f} us  {name[:90]}"
            for name, (calls, us) in rows
        ]
        return "\n".join([head, *lines])


def main(arguments: list[str] | None = None) -> int:
    """Profile and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.speed.engine_profile", description=__doc__)
    parser.add_argument("--model", choices=list(SHAPES), default="Qwen3-8B")
    parser.add_argument("--variant", choices=list(VARIANTS), default="fp8-kv")
    parser.add_argument("--num-seqs", type=int, default=512)
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--steps", type=int, default=8, help="of each kind")
    parser.add_argument("--rows", type=int, default=20, help="kernels in a table")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a toy of the shape")
    options = parser.parse_args(arguments)
    config = make_toy(SHAPES[options.model]) if options.quick else SHAPES[options.model]
    config = dataclasses.replace(config, num_layers=options.layers or config.num_layers)
    model = build_model(config, VARIANTS[options.variant].numerics(FP8_RECIPE), options.device)
    longest = options.prompt_len + options.output_len
    llm = LLM(model, max_num_seqs=options.num_seqs, max_model_len=longest, enable_prefix_caching=False)
    for profile in profile_engine(llm.engine, options.num_seqs, options.prompt_len, options.output_len, options.steps):
        print(profile.format(options.rows), flush=True)
    return 0


def profile_engine(
    engine: Engine, num_seqs: int, prompt_len: int, output_len: int, num_steps: int
) -> tuple[Profile, Profile]:
    """Profiles of steps with prompts in them and of steps of single tokens alone.

    Args:
        num_steps: profiled of each kind, one after the other, if there are so many. Sequences whose prompts came first
            end first: output_len should be more than the steps that all prompts take.
    """
    engine.warm_up(num_seqs, prompt_len + output_len)
    _add(engine, min(num_seqs, 3), prompt_len, 2)
    while engine.has_unfinished:
        engine.step()
    requests = _add(engine, num_seqs, prompt_len, output_len)
    sequences = [request.sequences[0] for request in requests]
    prefill, decode = Profile("steps with prompts"), Profile("steps of single tokens")
    engine.step()  # the first waits for what it launches
    while engine.has_unfinished:
        is_prefill = any(seq.num_computed_tokens < prompt_len for seq in sequences)
        profile = prefill if is_prefill else decode
        if profile.num_steps:
            engine.step()
        else:
            _profile_steps(engine, profile, num_steps)
    return prefill, decode


def _add(engine: Engine, num_seqs: int, prompt_len: int, output_len: int) -> list[RequestState]:
    rng, vocab = random.Random(0), engine.model.config.vocab_size
    params = SamplingParams(temperature=1.0, max_tokens=output_len, ignore_eos=True)
    return [engine.add_request(rng.choices(range(vocab), k=prompt_len), params) for _ in range(num_seqs)]


def _profile_steps(engine: Engine, profile: Profile, num_steps: int) -> None:
    is_gpu = engine.model.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if is_gpu else activity.CPU]) as found:
        _wait(is_gpu)
        began = time.perf_counter()
        while engine.has_unfinished and profile.num_steps < num_steps:
            engine.step()
            profile.num_steps += 1
        _wait(is_gpu)
        profile.seconds = time.perf_counter() - began
    types = torch.autograd.DeviceType  # type: ignore[attr-defined]
    device = types.CUDA if is_gpu else types.CPU
    for event in found.events():
        if event.device_type == device:
            known = profile.kernels.setdefault(event.name, [0.0, 0.0])
            known[0] += 1
            known[1] += event.self_device_time_total if is_gpu else event.self_cpu_time_total


def _wait(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
