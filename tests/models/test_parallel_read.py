"""Bytes of files, read by several threads: all of them, in their places, and nothing past a file's end."""

from pathlib import Path

import pytest
import torch

from octavo.models.checkpoint.parallel_read import ParallelReader
from octavo.testing import assert_bitwise


def make_file(path: Path, num_bytes: int) -> torch.Tensor:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    path.write_bytes(bytes(data.tolist()))
    return data


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("num_bytes", [0, 1, 99, 100, 101, 1234])
def test_every_byte_comes_to_its_place(start: int, num_bytes: int, tmp_path: Path, device: torch.device) -> None:
    data = make_file(tmp_path / "a", start + num_bytes + 3)
    other = make_file(tmp_path / "b", 250)
    reader = ParallelReader(chunk_bytes=100)
    for _ in range(2):
        out = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        reader.read(tmp_path / "a", start, out)
        assert_bitwise(out.cpu(), data[start : start + num_bytes])
        whole = torch.zeros(250, dtype=torch.uint8, device=device)
        reader.read(tmp_path / "b", 0, whole)
        assert_bitwise(whole.cpu(), other)
        reader.close()  # and it opens again


@pytest.mark.parametrize("num_bytes", [51, 300])
def test_a_file_that_ends_early(num_bytes: int, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 50)
    with pytest.raises(OSError, match="the file ends at byte 50, "):
        ParallelReader(chunk_bytes=100).read(tmp_path / "a", 0, torch.zeros(num_bytes, dtype=torch.uint8))
    with pytest.raises(FileNotFoundError):
        ParallelReader().read(tmp_path / "none", 0, torch.zeros(1, dtype=torch.uint8))


@pytest.mark.gpu
def test_a_gpu_gets_them_while_its_memory_is_reused(tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 5000)
    reader = ParallelReader(chunk_bytes=64)
    with torch.cuda.stream(torch.cuda.Stream()):
        for first in range(0, 1000, 100):
            out = torch.empty(4000, dtype=torch.uint8, device="cuda")
            reader.read(tmp_path / "a", first, out)
            assert_bitwise((out ^ 1).cpu(), data[first : first + 4000] ^ 1)


@pytest.mark.parametrize(("width", "num_rows"), [(1, 7), (30, 1), (30, 3), (30, 11), (100, 2)])
def test_rows_come_from_places_of_their_own(width: int, num_rows: int, tmp_path: Path, device: torch.device) -> None:
    data, stride = make_file(tmp_path / "a", 5 + 120 * num_rows), 120
    out = torch.zeros(num_rows, width, dtype=torch.uint8, device=device)
    ParallelReader(chunk_bytes=100).read(tmp_path / "a", 5, out, stride)
    assert_bitwise(out.cpu(), data[5:].view(num_rows, stride)[:, :width].contiguous())
    with pytest.raises(OSError, match="the file ends at byte"):
        ParallelReader(chunk_bytes=100).read(tmp_path / "a", 5 + stride, out, stride)
