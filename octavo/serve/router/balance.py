"""Which replica gets a request: the one that has seen most of its prompt, unless it has clearly more to do."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

# bytes of a body that are hashed together, about a KV page of text, and how many of its chunks are
CHUNK_BYTES, MAX_CHUNKS = 256, 512
# chunks that are remembered of each replica: 64 MiB of prompts
MAX_REMEMBERED = 1 << 18
# load by which a replica may be above the least loaded one and still be chosen for its prefix: this and a quarter
MARGIN, RATIO = 8.0, 1.25
# bytes of a body that weigh as much as a request
BYTES_A_REQUEST = 8 << 10

_FIELDS = (b'"prompt"', b'"messages"', b'"tokens"')


def chunks_of(body: bytes) -> list[bytes]:
    """Hashes of the prompt's beginnings, each a chunk longer than the last.

    The prompt is taken as it stands in the JSON: a client writes equal beginnings in equal bytes, and nothing but speed
    depends on it.
    """
    start = next((place for field in _FIELDS if (place := body.find(field)) >= 0), len(body))
    prompt = memoryview(body)[start : start + CHUNK_BYTES * MAX_CHUNKS]
    sums, running = [], hashlib.blake2b(digest_size=8)
    for end in range(CHUNK_BYTES, len(prompt) + 1, CHUNK_BYTES):
        running.update(prompt[end - CHUNK_BYTES : end])
        sums.append(running.digest())
    return sums


def weight_of(body: bytes) -> float:
    """What a request adds to its replica's load."""
    return 1.0 + len(body) / BYTES_A_REQUEST


class Balance:
    """Remembers which replica has seen which prompts.

    Args:
        size: replicas.
    """

    def __init__(self, size: int) -> None:
        self._seen: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]
        self._num_chosen = [0] * size

    def choose(self, chunks: Sequence[bytes], loads: Mapping[int, float]) -> int:
        """The replica for a prompt; it will have seen it.

        Args:
            chunks: see chunks_of.
            loads: of each replica that may be chosen.
        """
        most = RATIO * min(loads.values()) + MARGIN
        prefixes = {index: self._shared(index, chunks) if load <= most else 0 for index, load in loads.items()}
        chosen = min(loads, key=lambda index: (-prefixes[index], loads[index], self._num_chosen[index]))
        self._num_chosen[chosen] += 1
        self._remember(chosen, chunks)
        return chosen

    def forget(self, index: int) -> None:
        """A replica's cache is empty."""
        self._seen[index].clear()

    def _shared(self, index: int, chunks: Sequence[bytes]) -> int:
        seen = self._seen[index]
        return next((count for count, chunk in enumerate(chunks) if chunk not in seen), len(chunks))

    def _remember(self, index: int, chunks: Sequence[bytes]) -> None:
        seen = self._seen[index]
        for chunk in reversed(chunks):  # a prompt's end is forgotten before its beginning
            seen[chunk] = None
            seen.move_to_end(chunk)
        while len(seen) > MAX_REMEMBERED:
            seen.popitem(last=False)
