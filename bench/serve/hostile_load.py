"""Honest clients beside hostile ones: `python -m bench.serve.hostile_load --seconds 10`.

It serves a tiny random model by `octavo serve`, asks for completions and chats from ten clients, measures their
latencies and those of /health, which a busy event loop alone holds up, first in quiet and then beside each attack of
ATTACKS, and ends with 1 where a 99th percentile of an attack is above both twice the quiet one and the quiet one and
250 ms, three times in a row, each time beside a quiet time just before. An attack is a process of lower priority, for
strangers have machines of their own. What it takes of this machine all the same, and what other programs take, a
process shows that has nothing to do with the server: by as much as its work takes longer, the limit is higher. `--url`
takes a server that runs, whose model then decides. Everything ends by itself. All attacks on the tiny server go into
bench/records, others where `--out` says, with the last try of each attack.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx

from bench.options import RECORDS
from bench.program import Program
from bench.record import Record
from octavo.env import child_environment
from octavo.models import ModelConfig, load_model, save_model, train_bpe

NUM_HONEST, NUM_PROBES = 10, 3
MAX_FACTOR, MAX_EXTRA_S = 2.0, 0.25
_TRIES = 3
MEGABYTE = 1_000_000
JSON = "Content-Type: application/json\r\n"
# the last message decides how often it loops, as no template should
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if messages[-1]['content'] == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}assistant: "
)
# some ms of work, ten times a second, and how long each took
REFERENCE = """
import time
while True:
    began = time.perf_counter()
    sum(range(400_000))
    print(time.perf_counter() - began, flush=True)
    time.sleep(0.08)
"""
Attack = Callable[[str], Awaitable[None]]


@dataclasses.dataclass
class Round:
    """Seconds that honest clients waited for text and for /health, and the mean time of the reference's work."""

    answers: list[float] = dataclasses.field(default_factory=list)
    health: list[float] = dataclasses.field(default_factory=list)
    work_s: float = 0.0

    def __str__(self) -> str:
        both = (("text", self.answers), ("health", self.health))
        shown = [f"{name} {', '.join(_shown(seconds, p) for p in (50, 99))}" for name, seconds in both]
        return f"{len(self.answers):4} answers; {'; '.join(shown)}; reference {1e3 * self.work_s:.0f} ms"


def _shown(seconds: list[float], percent: float) -> str:
    return f"p{percent} {1e3 * percentile(seconds, percent):.0f} ms"


def percentile(values: list[float], percent: float) -> float:
    """By the nearest rank, upwards; infinite where no request was answered."""
    ordered = sorted(values) or [float("inf")]
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def limit_s(quiet: float, slowdown: float) -> float:
    """What the 99th percentile may be beside an attack.

    Args:
        quiet: what it is alone.
        slowdown: times that the reference's work took, beside the quiet time.
    """
    return max(MAX_FACTOR * quiet, quiet + MAX_EXTRA_S) * max(1.0, slowdown)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a line an attack, write a record; 1 where the honest clients had to wait."""
    parser = Program("bench.serve.hostile_load", __doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--url", help="of a server that runs; one of its own by default")
    parser.add_argument("--attacks", nargs="*", default=[*ATTACKS], choices=[*ATTACKS])
    parser.add_argument("--only-attack", choices=[*ATTACKS], help="--url by this for --seconds, and measure nothing")
    options = parser.parse(arguments)
    if options.only_attack is not None:
        print("begun", flush=True)
        asyncio.run(_for_a_while(ATTACKS[options.only_attack], options.url, options.seconds))
        return 0
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(tiny_server())
        found = asyncio.run(run(url, options.seconds, options.attacks))
    is_whole = options.url is None and {*options.attacks} == {*ATTACKS}
    if folder := options.out or (RECORDS if is_whole else None):
        print(make_record(found, options.seconds).save(folder, options.commit))
    return int(not all(outcome.is_borne for outcome in found.values()))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The honest clients beside an attack, in its last try.

    Attributes:
        quiet: the round just before it.
        number: of the try, from 1.
    """

    quiet: Round
    found: Round
    number: int

    @property
    def slowdown(self) -> float:
        """How many times as long the reference's work took."""
        return self.found.work_s / self.quiet.work_s

    @property
    def seconds(self) -> dict[str, tuple[float, float, float]]:
        """What the clients waited for -> its 99th percentile in quiet, beside the attack, and its limit there."""
        both = {"text": (self.quiet.answers, self.found.answers), "health": (self.quiet.health, self.found.health)}
        ends = {what: [percentile(values, 99) for values in pair] for what, pair in both.items()}
        return {what: (alone, seen, limit_s(alone, self.slowdown)) for what, (alone, seen) in ends.items()}

    @property
    def is_borne(self) -> bool:
        return all(alone < float("inf") and seen <= most for alone, seen, most in self.seconds.values())

    def __str__(self) -> str:
        limits = " and ".join(f"{1e3 * most:.0f}" for _, _, most in self.seconds.values())
        return f"{self.found}; limits {limits} ms{'' if self.is_borne else '   TOO SLOW'}"


async def run(url: str, seconds: float, names: list[str]) -> dict[str, Outcome]:
    """Attack -> what came of it, at last."""
    await measure(url, seconds / 5)  # a first round compiles and captures what it needs
    outcomes: dict[str, Outcome] = {}
    for number in range(1, _TRIES + 1):  # another program of this machine may have been what was slow
        if names:
            quiet = await measure(url, seconds)
            print(f"{'quiet':<18} {quiet}", flush=True)
        for name in names:
            outcomes[name] = Outcome(quiet, await beside(name, url, seconds), number)
            print(f"{name:<18} {outcomes[name]}", flush=True)
        names = [name for name in names if not outcomes[name].is_borne]
    return outcomes


def make_record(outcomes: dict[str, Outcome], seconds: float) -> Record:
    """A row an attack for what clients waited for, and for the limit."""
    what = (
        f"`octavo serve` of a tiny random model on a CPU: {NUM_HONEST} honest clients for {seconds:g} s in quiet and "
        "beside each attack, which is a process of lower priority on the same machine. Limit: the larger of "
        f"{MAX_FACTOR:g} times the quiet p99 and {1e3 * MAX_EXTRA_S:.0f} ms more, times the slowdown of a process that "
        f"has nothing to do with the server; an attack that passes it is tried again, up to {_TRIES} times, beside "
        "another quiet time."
    )
    record = Record("hostile_load", what, device="cpu")
    for name, outcome in outcomes.items():
        for of, (alone, seen, most) in outcome.seconds.items():
            record.add(name, f"{of}, p99", "ms", 1e3 * seen, peer="quiet", peer_value=1e3 * alone)
            record.add(name, f"{of}, limit of the p99", "ms", 1e3 * most)
        record.add(name, "slowdown of the reference", "x", outcome.slowdown)
        record.add(name, "tries", "", outcome.number)
    return record


async def beside(name: str, url: str, seconds: float) -> Round:
    """The honest clients while an attack goes on, from a second after its start."""
    command = [sys.executable, "-m", "bench.serve.hostile_load", "--only-attack", name, "--url", url]
    command += ["--seconds", str(seconds + 1.0)]
    attacker = await asyncio.create_subprocess_exec("nice", *command, stdout=asyncio.subprocess.PIPE)
    assert attacker.stdout is not None, "it is a pipe"
    try:
        assert await attacker.stdout.readline() == b"begun\n", "the attack did not begin; its errors stand above"
        await asyncio.sleep(1.0)
        return await measure(url, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            attacker.kill()
        await attacker.wait()


async def measure(url: str, seconds: float) -> Round:
    """Ten honest clients: completions, streams, chats, and every answer is whole."""
    found = Round()
    async with reference() as work, asyncio.TaskGroup() as group:
        end = time.perf_counter() + seconds
        for number in range(NUM_HONEST):
            group.create_task(_honest(url, number, end, found))
        for _ in range(NUM_PROBES):
            group.create_task(_probe(url, end, found))
    found.work_s = statistics.mean(work)
    return found


@asynccontextmanager
async def reference() -> AsyncIterator[list[float]]:
    """Work in a process of its own; at the end the list has the seconds that each piece took."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", REFERENCE, stdout=asyncio.subprocess.PIPE, limit=1 << 30
    )
    assert process.stdout is not None, "it is a pipe"
    seconds = [float(await process.stdout.readline())]
    try:
        yield seconds
    finally:
        process.kill()
        output, _ = await process.communicate()
        seconds += [float(line) for line in output.decode().splitlines(keepends=True) if line.endswith("\n")]


async def _honest(url: str, number: int, end: float, found: Round) -> None:
    fields: dict[str, object] = {"max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while time.perf_counter() < end:
            began = time.perf_counter()
            if number % 3 == 0:
                chat = {"messages": [{"role": "user", "content": f"hello {number}"}]}
                answer = await client.post("/v1/chat/completions", json=fields | chat)
            else:
                answer = await client.post(
                    "/v1/completions", json=fields | {"prompt": "sea", "stream": number % 3 == 1}
                )
            found.answers.append(time.perf_counter() - began)
            assert answer.status_code == 200 and '"finish_reason":"length"' in answer.text, answer.text
            await asyncio.sleep(0.1)


async def _probe(url: str, end: float, found: Round) -> None:
    """Several at once, so that one stall is more than a hundredth of all answers."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while time.perf_counter() < end:
            began = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            found.health.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)


async def _for_a_while(attack: Attack, url: str, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await attack(url)


async def _post_forever(url: str, path: str, body: bytes, num_clients: int) -> None:
    """Clients that send one body again and again, whatever the answer is."""

    async def one() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await client.post(path, content=body, headers={"Content-Type": "application/json"})
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(num_clients)))


async def long_prompts(url: str) -> None:
    """Six clients with prompts of 5 MB."""
    body = json.dumps({"prompt": "tell me of the sea " * (5 * MEGABYTE // 19)}).encode()
    await _post_forever(url, "/v1/completions", body, 6)


async def many_messages(url: str) -> None:
    """Four clients with 180,000 messages each."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}] * 180_000}).encode()
    await _post_forever(url, "/v1/chat/completions", body, 4)


async def looping_template(url: str) -> None:
    """Two clients whose message makes the chat template loop."""
    body = json.dumps({"messages": [{"role": "user", "content": "loop"}], "max_tokens": 1}).encode()
    await _post_forever(url, "/v1/chat/completions", body, 2)


async def large_logit_bias(url: str) -> None:
    """Four clients with a logit_bias of 200,000 entries."""
    body = json.dumps({"prompt": "a", "logit_bias": {str(i): 1.0 for i in range(200_000)}}).encode()
    await _post_forever(url, "/v1/completions", body, 4)


async def odd_lists(url: str) -> None:
    """Two clients whose prompt of 4,000,000 items is of two kinds, and two with 2,700,000 empty lists."""
    mixed = b'{"prompt":[[1],' + b",".join([b"1"] * 4_000_000) + b"]}"
    lists = b'{"prompt":[' + b",".join([b"[]"] * 2_700_000) + b"]}"
    await asyncio.gather(*(_post_forever(url, "/v1/completions", body, 2) for body in (mixed, lists)))


async def unknown_fields(url: str) -> None:
    """Two clients with 500,000 fields that do not exist."""
    body = json.dumps({f"f{i}": 1 for i in range(500_000)}).encode()
    await _post_forever(url, "/v1/completions", body, 2)


async def many_tokens(url: str) -> None:
    """Two clients that want 4,000,000 token ids as text, two that want the tokens of 5 MB shown one by one."""
    ids = b'{"tokens":[' + b",".join([b"9"] * 4_000_000) + b"]}"
    text = json.dumps({"prompt": "sea " * (5 * MEGABYTE // 4), "return_token_strs": True}).encode()
    await asyncio.gather(_post_forever(url, "/detokenize", ids, 2), _post_forever(url, "/tokenize", text, 2))


async def slow_heads(url: str) -> None:
    """600 connections whose request line comes a byte a second."""
    await _trickle(url, 600, "POST /v1/completions HTTP/1.1\r\nHost: a\r\n")


async def slow_bodies(url: str) -> None:
    """300 connections whose body comes a byte a second."""
    await _trickle(url, 300, f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{JSON}Content-Length: 1000000\r\n\r\n")


async def silent_readers(url: str) -> None:
    """20 connections that ask for 40 pages, more than their few kilobytes of buffer hold, and never read them."""
    await _trickle(url, 20, "GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 40, buffer_bytes=4096)


async def leaving_clients(url: str) -> None:
    """Three clients that ask for long answers and go: more would be a full server, which is another matter."""
    body = json.dumps({"prompt": "sea", "max_tokens": 400, "ignore_eos": True}).encode()

    async def one() -> None:
        while True:
            async with _connected(url) as (_, writer):
                head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await asyncio.sleep(0.3)

    await asyncio.gather(*(one() for _ in range(3)))


async def _trickle(url: str, num_clients: int, beginning: str, buffer_bytes: int | None = None) -> None:
    """Connections that send a beginning and then a byte a second; those that the server ends come again."""

    async def one(number: int) -> None:
        await asyncio.sleep(number / num_clients)
        while True:
            with contextlib.suppress(OSError):
                async with _connected(url, buffer_bytes) as (_, writer):
                    writer.write(beginning.encode())
                    while not writer.is_closing():
                        await asyncio.sleep(1.0)
                        writer.write(b"x")
                        await writer.drain()

    await asyncio.gather(*(one(number) for number in range(num_clients)))


@asynccontextmanager
async def _connected(
    url: str, buffer_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = httpx.URL(url)
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (parts.host, parts.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        *(long_prompts, many_messages, looping_template, large_logit_bias, odd_lists, unknown_fields, many_tokens),
        *(slow_heads, slow_bodies, silent_readers, leaving_clients),
    )
}


@contextmanager
def tiny_server(*arguments: str) -> Iterator[str]:
    """`octavo serve` of a random model of one layer, with a chat template that can be made to loop; its address."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        make_checkpoint(path)
        command = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", str(path)]
        command += ["--port", "0", "--device", "cpu", "--max-num-seqs", "16", "--num-kv-pages", "256", *arguments]
        # one thread: on cores that the clients use too, threads would wait for each other
        environment = child_environment(OMP_NUM_THREADS="1")
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            yield _wait_for(process)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stderr is not None, "it is a pipe"
            process.stderr.close()


def make_checkpoint(path: Path) -> None:
    """The tiny server's."""
    tokenizer = train_bpe(["tell me of the sea and the sky, hello hi sea 1234567890"] * 3, 300)
    tokenizer.chat_template = TEMPLATE
    config = ModelConfig(
        family="qwen3",
        vocab_size=320,
        hidden_size=128,
        intermediate_size=344,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        qk_norm=True,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
    )
    save_model(load_model(config, seed=0, device="cpu"), path, tokenizer=tokenizer)


def _wait_for(process: "subprocess.Popen[str]") -> str:
    """The address of a server's log, once it is ready; what it logs later is read and dropped."""
    assert process.stderr is not None, "it is a pipe"
    log: list[str] = []
    for line in process.stderr:
        log.append(line)
        if match := re.search(r"listening at (http://\S+)", line):
            break
    else:
        raise RuntimeError(f"the server did not start: {''.join(log)}")
    threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
    with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=60) as client:
        for _ in range(6000):
            if client.get(f"{match[1]}/ready").status_code == 200:
                return match[1]
            time.sleep(0.01)
    raise RuntimeError(f"the server is not ready: {''.join(log)}")


if __name__ == "__main__":
    sys.exit(main())
