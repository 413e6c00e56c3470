"""The exact scaled GEMM of a GPU: padded to few sizes, and refused where a library's rows depend on one another."""

from collections.abc import Iterator

import pytest
import torch

from octavo.errors import BackendError
from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.ops._runtime.kernel_requests import leaving_out_launches
from octavo.ops.gemm.scaled_mm import exact, library, scaled_mm, scaled_mm_reference
from octavo.testing import assert_bitwise

PAIRS = {
    "row": (Scaling.per_row(), Scaling.per_row()),
    "row-tensor": (Scaling.per_row(), Scaling.per_tensor()),
    "block": (Scaling.block_1x128(), Scaling.block_128x128()),
}


@pytest.fixture(autouse=True)
def forget_what_was_checked() -> Iterator[None]:
    exact._checked.clear()
    yield
    exact._checked.clear()


def operands(kind: str, M: int, N: int = 48, K: int = 256, device: str = "cpu") -> tuple[QuantizedTensor, ...]:
    generator = torch.Generator().manual_seed(0)
    matrices = (torch.randn(rows, K, generator=generator).to(device, torch.bfloat16) for rows in (M, N))
    return tuple(quantize_reference(x, scaling) for x, scaling in zip(matrices, PAIRS[kind], strict=True))


class Library:
    """A stand-in for the GPU's: the reference's products, and the sizes that it was asked for."""

    def __init__(self, off_at: tuple[int, ...] = ()) -> None:
        self.off_at, self.sizes = off_at, []

    def __call__(self, a, b, bias, out_dtype, *, fast_accum=False):  # type: ignore[no-untyped-def]
        self.sizes.append(a.shape[0])
        out = scaled_mm_reference(a, b, bias, torch.float32)
        return (out * (1 + 2**-7) if a.shape[0] in self.off_at else out).to(out_dtype)


class OffInAPlace(Library):
    """Off in the first row, whichever that is."""

    def __call__(self, a, b, bias, out_dtype, **kwargs):  # type: ignore[no-untyped-def]
        out = super().__call__(a, b, bias, out_dtype, **kwargs)
        out[0] *= 2
        return out


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "CHECKED_ROWS", (64, 128, 256))


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("M", [1, 64, 65, 130])
def test_rows_are_padded_to_a_bucket(M: int, kind: str, few_checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Library()
    monkeypatch.setattr(library, "scaled_mm_cuda", stand_in)
    a, b = operands(kind, M)
    bias = torch.randn(48)
    found = exact.scaled_mm_exact(a, b, bias, torch.bfloat16)
    assert_bitwise(found, scaled_mm_reference(a, b, bias, torch.bfloat16))
    assert stand_in.sizes[-1] == {1: 64, 64: 64, 65: 128, 130: 256}[M]
    checked = len(stand_in.sizes)
    exact.scaled_mm_exact(a, b, bias, torch.bfloat16)
    assert len(stand_in.sizes) == checked + 1, "a shape is checked once"


def test_buckets() -> None:
    assert [exact.bucket_of(n) for n in (1, 64, 65, 512, 513, 1024, 5000)] == [64, 64, 128, 512, 1024, 1024, 5120]


@pytest.mark.parametrize("kind", PAIRS)
def test_rows_are_padded_past_a_size_of_other_bits(
    kind: str, few_checks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in = Library(off_at=(64, 128))
    monkeypatch.setattr(library, "scaled_mm_cuda", stand_in)
    a, b = operands(kind, 3)
    wanted = scaled_mm_reference(a, b, None, torch.bfloat16)
    for _ in range(2):
        assert_bitwise(exact.scaled_mm_exact(a, b, None, torch.bfloat16), wanted)
        assert stand_in.sizes[-1] == 256
    (line,) = [record.getMessage() for record in caplog.records]
    assert "N = 48, K = 256 to torch.bfloat16 has other bits at M = 64, 128; products of these" in line


def test_steps_without_their_kernels_check_nothing(few_checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = OffInAPlace()
    monkeypatch.setattr(library, "scaled_mm_cuda", stand_in)
    with leaving_out_launches():
        exact.scaled_mm_exact(*operands("row", 3), None, torch.bfloat16)
    assert stand_in.sizes == [64]
    with pytest.raises(BackendError, match="bits differ"):
        exact.scaled_mm_exact(*operands("row", 3), None, torch.bfloat16)


@pytest.mark.parametrize("kind", PAIRS)
def test_dependent_rows_are_refused(kind: str, few_checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "scaled_mm_cuda", OffInAPlace())
    a, b = operands(kind, 100)
    for _ in range(2):  # nothing was taken for checked
        with pytest.raises(BackendError, match=r"N = 48, K = 256 to torch.bfloat16: bits differ at M = 128, 256 from"):
            exact.scaled_mm_exact(a, b, None, torch.bfloat16)


@pytest.mark.parametrize("kind", PAIRS)
def test_every_size_is_checked_before_its_first_product(
    kind: str, few_checks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product runs at a size that was not compared: also between two sizes that were, and below the largest."""
    monkeypatch.setattr(exact, "BUCKETS", (64, 128))
    stand_in = Library()
    monkeypatch.setattr(library, "scaled_mm_cuda", stand_in)
    compared = []
    for rows in (3, 256, 1024, 600, 700, 640, 100):
        before = len(stand_in.sizes)
        exact.scaled_mm_exact(*operands(kind, rows, 16, 128), None, torch.bfloat16)
        assert stand_in.sizes[-1] == exact.bucket_of(rows)
        compared.append(stand_in.sizes[before + 1 : -1])  # after the one that they are compared with
    assert compared == [[64, 128, 256], [], [1024], [640], [768], [], []]
    stand_in.off_at = (896,)
    exact.scaled_mm_exact(*operands(kind, 800, 16, 128), None, torch.bfloat16)
    assert stand_in.sizes[-3:] == [256, 896, 1024], "the next size had been compared"
    stand_in.off_at = tuple(range(1152, 1408 + 1, 128))
    with pytest.raises(BackendError, match=r"bits differ at M = 1152, 1280 from those at M = 256"):
        exact.scaled_mm_exact(*operands(kind, 1100, 16, 128), None, torch.bfloat16)


def test_sizes_of_the_first_check() -> None:
    assert exact.CHECKED_ROWS == (64, 128, 256, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)


@pytest.mark.parametrize("place", [0, 255, 256, 300, 575])
def test_every_place_is_compared(place: int, few_checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is off in one row of 576, wherever that lies."""
    stand_in = Library()

    def off_at_a_place(a, b, bias, out_dtype, **kwargs):  # type: ignore[no-untyped-def]
        out = stand_in(a, b, bias, out_dtype, **kwargs)
        if len(out) == 576:
            out[place] *= 2
        return out

    monkeypatch.setattr(exact, "BUCKETS", (64,))
    monkeypatch.setattr(library, "scaled_mm_cuda", off_at_a_place)
    exact.scaled_mm_exact(*operands("row", 570, 16, 128), None, torch.bfloat16)
    assert 576 in stand_in.sizes and stand_in.sizes[-1] == 640


def test_no_check_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BackendError, match=r"run per_row x per_row of N = 48, K = 256 .* once before the capture"):
        exact.scaled_mm_exact(*operands("row", 3), None, torch.bfloat16)


def test_a_capture_of_checked_rows_goes_on(few_checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "scaled_mm_cuda", Library())
    exact.scaled_mm_exact(*operands("row", 3), None, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    exact.scaled_mm_exact(*operands("row", 200), None, torch.bfloat16)
    with pytest.raises(BackendError, match=r"with M = 512 once before the capture"):
        exact.scaled_mm_exact(*operands("row", 300), None, torch.bfloat16)


def test_rows_that_share_a_scale_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "scaled_mm_cuda", Library())
    a = quantize_reference(torch.randn(5, 256), Scaling.per_tensor())
    b = quantize_reference(torch.randn(48, 256), Scaling.per_tensor())
    assert_bitwise(exact.scaled_mm_exact(a, b, None, torch.float32), scaled_mm_reference(a, b, None, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (4096, 12288), (24576, 4096), (96, 344)])
def test_on_a_gpu(N: int, K: int, kind: str) -> None:
    a, b = operands(kind, 700, N, K, "cuda")
    whole = scaled_mm(a, b, exact=True)
    for rows in ([0], [699, 3], list(range(1, 700, 7)), list(range(513))):
        part = QuantizedTensor(
            a.qdata.view(torch.uint8)[rows].view(a.qdata.dtype), a.scale[rows].t().contiguous().t(), a.scaling
        )
        assert_bitwise(scaled_mm(part, b, exact=True), whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PAIRS)
def test_every_size_to_32768_on_a_gpu(kind: str) -> None:
    a_scaling, b_scaling = PAIRS[kind]
    device = torch.device("cuda", 0)
    product = exact.GemmProblem(a_scaling, b_scaling, 1024, 4096, torch.bfloat16, None, device)
    assert exact.find_dependent_rows(product, (*exact.CHECKED_ROWS, *range(4608, 32769, 512))) == []
