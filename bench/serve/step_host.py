"""CPU time of a decode step's host part: `python -m bench.serve.step_host --num-seqs 512`.

A toy model decodes, so that scheduling, sending, reading, text and streaming are what a step takes. On a GPU its steps
are CUDA graphs as a large model's; on a CPU a stand-in takes the graphs' place and computes nothing. Cases: `tokens` is
LLM.generate of token ids, `logprobs` the same with the sampled tokens' logprobs (a rollout), `stream` text for a
server, with each token's delta. Beside the time stands how many Python functions of octavo a step enters.
"""

import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import octavo
from bench.program import Program
from bench.record import Record, summarize
from bench.serve.made_tokenizer import make_tokenizer
from bench.serve.shapes import SHAPES, build_model, make_toy
from bench.speed.host_time import values_of
from octavo.numerics import Numerics, get_recipe
from octavo.serve import LLM, SamplingParams
from octavo.serve.engine.decode_graphs import StepGraph
from octavo.serve.engine.request import RequestState, delta_of

CASES = {"tokens": (None, False), "logprobs": (0, False), "stream": (None, True)}  # logprobs, whether text is kept
PROMPT_LEN = 8
WARM_STEPS = 8


class IdleGraph:
    """A captured draw that draws nothing."""

    def replay(self) -> None:
        """Nothing."""


class IdleGraphs:
    """Stands for DecodeGraphs on a CPU: lays out what a step sends, and computes nothing."""

    is_empty = True

    def __init__(self, num_seqs: int, vocab_size: int, spare_slot: int) -> None:
        inputs, logits = torch.zeros(2, num_seqs, dtype=torch.int32), torch.zeros(num_seqs, vocab_size)
        idle: Any = IdleGraph()
        self._graph = StepGraph(inputs, idle, idle, logits, torch.arange(num_seqs) % 200 + 40)
        self._spare_slot = spare_slot

    def find(self, num_rows: int, longest: int) -> StepGraph:
        """The one graph."""
        return self._graph

    def forward(self, graph: StepGraph, seq_lens: list[int], slots: list[int]) -> None:
        """As DecodeGraphs.forward, without its replay."""
        missing = graph.inputs.shape[1] - len(slots)
        rows = [[*seq_lens, *[0] * missing], [*slots, *[self._spare_slot] * missing]]
        graph.inputs.copy_(torch.tensor(rows, dtype=torch.int32))

    def clear(self) -> None:
        """Nothing is held."""


def make_llm(num_seqs: int, num_steps: int, device: str) -> LLM:
    """A toy with room for so many sequences, its steps graphs or their stand-in."""
    config = make_toy(SHAPES["Qwen3-8B"])
    model = build_model(config, Numerics(get_recipe("bf16")), device)
    longest = PROMPT_LEN + WARM_STEPS + num_steps + 8
    llm = LLM(
        model,
        make_tokenizer(config.vocab_size),
        max_num_seqs=num_seqs,
        max_model_len=longest,
        num_kv_pages=num_seqs * -(-longest // 64),
        async_scheduling=True,
    )
    if device == "cpu":
        graphs: Any = IdleGraphs(num_seqs, config.vocab_size, llm.engine.model_runner.slots.num_slots)
        llm.engine.model_runner.graphs = graphs
    return llm


class Steps:
    """Steps of one case, all sequences decoding."""

    def __init__(self, llm: LLM, case: str, num_seqs: int, num_steps: int) -> None:
        logprobs, self._keeps_text = CASES[case]
        self._engine = llm.engine
        params = SamplingParams(max_tokens=WARM_STEPS + num_steps, ignore_eos=True, logprobs=logprobs)
        self._requests: dict[Any, RequestState] = {}
        for i in range(num_seqs):
            prompt = [40 + (i + k) % 400 for k in range(PROMPT_LEN)]
            request = self._engine.add_request(prompt, params, keep_text=self._keeps_text)
            self._requests |= dict.fromkeys(request.sequences, request)
        for _ in range(WARM_STEPS // 2):
            self.step()

    def step(self) -> None:
        """One step, and what a server makes of its tokens."""
        advanced = self._engine.step()
        if self._keeps_text:
            now = time.perf_counter()
            _ = [delta_of(self._requests[seq], seq, now) for seq in advanced]

    def end(self) -> None:
        """Drop what runs."""
        self._engine.abort_all()


def count_calls(steps: Steps) -> int:
    """Python functions of octavo that a step enters."""
    root, count = str(Path(octavo.__file__).parent), 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(root)

    sys.setprofile(note)
    try:
        steps.step()
    finally:
        sys.setprofile(None)
    return count


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the record."""
    parser = Program("bench.serve.step_host", __doc__)
    parser.add_argument("--num-seqs", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100, help="measured of each case")
    parser.add_argument("--before", type=Path, help="record of another tree on this machine, to stand beside this one")
    options = parser.parse(arguments)
    what = f"Host time of a decode step of {options.num_seqs} sequences of a toy model, and its Python calls."
    record = Record("step_host", what, device=options.device)
    old, peer = values_of(options.before)
    llm = make_llm(options.num_seqs, options.steps + 4, options.device)
    clock = time.thread_time if options.device == "cpu" else time.perf_counter  # others' work on the cores is not ours
    for case in CASES:
        steps = Steps(llm, case, options.num_seqs, options.steps + 4)
        seconds = []
        for _ in range(options.steps):
            began = clock()
            steps.step()
            seconds.append(clock() - began)
        timing, num_calls = summarize([1e6 * s for s in seconds]), count_calls(steps)
        steps.end()
        median, p20, p80 = (us / 1e3 for us in (timing.median_us, timing.p20_us, timing.p80_us))
        record.add(case, "host time", "ms", median, p20, p80, peer, old.get((case, "host time")))
        record.add(case, "Python calls", "calls", num_calls, peer=peer, peer_value=old.get((case, "Python calls")))
        print(f"{case:<10} {median:7.3f} ms ({p20:.3f} to {p80:.3f}) {num_calls:7d} calls a step", flush=True)
    if options.out is not None:
        print(f"record: {record.save(options.out, options.commit)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
