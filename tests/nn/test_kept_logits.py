"""token_logprobs whose backward takes the forward's logits: same results, right gradients, no more memory than told."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from octavo.nn import logprob
from octavo.nn.logprob import token_logprobs
from octavo.ops.logprob import chunks, linear
from octavo.testing import assert_bitwise
from tests.assertions import assert_all_bitwise, assert_all_sqnr

DTYPES = {"fp32": (torch.float32, 90.0), "bf16": (torch.bfloat16, 50.0)}  # as in test_cross_entropy
TOKENS, WIDTH, VOCAB = 300, 40, 397
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

EXACT = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
Keep = Callable[[bool], None]


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Whether calls from here on keep their logits, on any device."""
    return lambda keeps: monkeypatch.setattr(chunks, "keeps_logits", lambda device, num_bytes: keeps)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or five chunks of tokens, the last of them shorter, and two of the vocabulary or four."""
    monkeypatch.setattr(chunks, "MAX_CHUNK_BYTES", 256 * VOCAB * 4)
    monkeypatch.setattr(logprob, "EXACT_CHUNK_SIZE", 64)


def make(generator: torch.Generator, device: torch.device, dtype: str = "fp32", has_bias: bool = True) -> Inputs:
    values = [torch.randn(TOKENS, WIDTH, generator=generator), torch.randn(VOCAB, WIDTH, generator=generator) * 0.5]
    if has_bias:
        values.append(3 * torch.randn(VOCAB, generator=generator))
    hidden, head, *bias = (x.to(device, DTYPES[dtype][0]).requires_grad_() for x in values)
    return hidden, head, bias[0] if bias else None


def score(inputs: Inputs, exact: bool = False, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropy) at temperature 0.7."""
    hidden, head, bias = inputs
    targets = 7 * torch.arange(len(hidden), device=hidden.device) % VOCAB
    options = {"temperature": 0.7, "head_bias": bias, "exact": exact} | options
    return token_logprobs(hidden, head, targets, **options)  # type: ignore[arg-type, return-value]


def upstream(like: torch.Tensor) -> torch.Tensor:
    values = torch.randn(len(like), generator=torch.Generator().manual_seed(1))
    values[::7] = 0
    return values.to(like.device)


def gradients(logprobs: torch.Tensor, inputs: Inputs, **options: bool) -> tuple[torch.Tensor, ...]:
    wanted = [x for x in inputs if x is not None]
    return torch.autograd.grad(logprobs, wanted, upstream(logprobs), **options)


def true_gradients(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    hidden, head, bias = (None if x is None else x.detach().double().requires_grad_() for x in inputs)
    logits = F.linear(hidden, head, bias) / 0.7
    targets = 7 * torch.arange(len(hidden), device=hidden.device) % VOCAB
    return gradients(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0], (hidden, head, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@EXACT
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_gradients_are_those_without_kept_logits(dtype, exact, has_bias, generator, device, keep) -> None:
    inputs = make(generator, device, dtype, has_bias)
    keep(False)
    remade = score(inputs, exact)
    wanted = gradients(remade[0], inputs)
    keep(True)
    kept = score(inputs, exact)
    found = gradients(kept[0], inputs)
    assert_all_bitwise(kept, remade)
    assert_all_sqnr(found, true_gradients(inputs), DTYPES[dtype][1])
    if device.type == "cpu" and not exact:  # one chunk, one product: the very logits
        assert_all_bitwise(found, wanted)
    else:
        assert_all_sqnr(found, wanted, DTYPES[dtype][1])


@pytest.mark.parametrize("dtype", DTYPES)
@EXACT
def test_chunks_of_kept_logits(dtype, exact, generator, device, keep, small_chunks) -> None:
    inputs = make(generator, device, dtype)
    keep(False)
    remade = score(inputs, exact)
    keep(True)
    kept = score(inputs, exact)
    assert_all_bitwise(kept, remade)
    assert_all_sqnr(gradients(kept[0], inputs), true_gradients(inputs), DTYPES[dtype][1])


@EXACT
def test_the_backward_makes_no_logits_again(exact, generator, device, keep, monkeypatch) -> None:
    inputs = make(generator, device)
    shapes = []

    def product(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        shapes.append((len(a), b.shape[1]))
        return chunks.product(a, b, **options)  # type: ignore[arg-type]

    of_gradients = [(TOKENS, WIDTH), (VOCAB, WIDTH)]
    for keeps in (False, True):
        keep(keeps)
        logprobs, _ = score(inputs, exact)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "product", product)
            gradients(logprobs, inputs)
        assert shapes == ([] if keeps else [(TOKENS, VOCAB)]) + of_gradients
        shapes.clear()


@EXACT
def test_a_second_backward_finds_the_logits(exact, generator, device, keep, small_chunks) -> None:
    keep(True)
    inputs = make(generator, device, "bf16")
    logprobs, _ = score(inputs, exact)
    first = gradients(logprobs, inputs, retain_graph=True)
    assert_all_bitwise(gradients(logprobs, inputs), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(logprobs, inputs)


class Holder:
    """What autograd holds in place of a saved tensor: it lets go of it as of the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def large_saved(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[weakref.ref[torch.Tensor]]]:
    """(what the call gave, the tensors as wide as the vocabulary that autograd saved, while any holds them)."""
    found = []

    def pack(tensor: torch.Tensor) -> Holder:
        if tensor.dim() == 2 and tensor.shape[1] == VOCAB:
            found.append(weakref.ref(tensor))
        return Holder(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        return call(), found


@EXACT
def test_logits_go_with_the_backward(exact, generator, device, keep, small_chunks) -> None:
    keep(True)
    inputs = make(generator, device)
    logprobs, saved = large_saved(lambda: score(inputs, exact)[0])
    held = [ref() for ref in saved]
    assert sum(map(len, held)) == TOKENS
    assert all(x.dtype == torch.float32 for x in held)
    assert sum(x.untyped_storage().nbytes() for x in held) <= chunks.kept_bytes(TOKENS, VOCAB)
    del held
    gradients(logprobs, inputs)
    assert logprobs.requires_grad
    assert [ref() for ref in saved] == [None] * len(saved)


@EXACT
def test_nothing_is_kept_where_it_may_not(exact, generator, device, keep) -> None:
    keep(True)
    inputs = make(generator, device)
    for one in range(3):  # any of the three
        some = tuple(x.detach().requires_grad_(place == one) for place, x in enumerate(inputs))
        assert large_saved(lambda some=some: score(some, exact)[0])[1]
    frozen = tuple(x.detach() for x in inputs)
    group = SimpleNamespace(rank=0, size=1, gather=lambda x: x, sum=lambda x: x)
    for given, options in ((frozen, {}), (inputs, {"chunk_size": 512}), (inputs, {"tensor_group": group})):
        logprobs, saved = large_saved(lambda given=given, options=options: score(given, exact, **options)[0])
        assert not saved
        if logprobs.requires_grad:
            assert_all_sqnr(gradients(logprobs, given), true_gradients(given), 90.0)
    asked = []

    def note(*arguments: object) -> bool:
        asked.append(arguments)
        return True

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(chunks, "keeps_logits", note)
        patch.setattr(linear, "empty_chunk", lambda rows, *rest: asked.append(rows) or chunks.empty_chunk(rows, *rest))
        patch.setattr(chunks, "MAX_CHUNK_BYTES", 256 * VOCAB * 4)
        assert not large_saved(lambda: score(inputs, exact)[0])[1]
    assert asked == ([] if exact else [256])


def test_the_bound(generator, device, monkeypatch) -> None:
    gpu, limit = torch.device("cuda", 0), chunks.MAX_KEPT_BYTES
    assert limit == 4 << 30
    assert chunks.keeps_logits(gpu, limit)
    assert not chunks.keeps_logits(gpu, limit + 1)
    assert not chunks.keeps_logits(torch.device("cpu"), 1)
    assert chunks.kept_bytes(8371, 128256) <= limit < chunks.kept_bytes(8372, 128256)
    assert (
        chunks.kept_bytes(3, 17)
        == 3 * 32 * 4
        == chunks.empty_chunk(3, 17, torch.float32, device).untyped_storage().nbytes()
    )
    asked = []
    monkeypatch.setattr(chunks, "keeps_logits", lambda *arguments: asked.append(arguments))
    inputs = make(generator, device)
    assert not large_saved(lambda: score(inputs)[0])[1]
    assert asked == [(inputs[0].device, chunks.kept_bytes(TOKENS, VOCAB))]


def test_compiled_whole(generator, keep) -> None:
    keep(True)
    inputs = make(generator, torch.device("cpu"))
    eager, _ = score(inputs)
    compiled, _ = torch.compile(score, fullgraph=True, backend="aot_eager")(inputs)
    assert_bitwise(compiled, eager)
    assert_all_bitwise(gradients(compiled, inputs), gradients(eager, inputs))


@pytest.mark.parametrize("tokens", [0, 1])
@EXACT
def test_few_tokens(tokens, exact, generator, device, keep) -> None:
    keep(True)
    hidden, head, bias = make(generator, device)
    inputs = hidden[:tokens], head, bias
    logprobs, _ = score(inputs, exact)
    assert_all_sqnr(gradients(logprobs, inputs), true_gradients(inputs), 90.0)


@pytest.mark.gpu
@EXACT
@pytest.mark.parametrize(("tokens", "vocab"), [(2048, 128256), (777, 50257)])
def test_a_real_vocabulary(tokens, vocab, exact, generator) -> None:
    hidden = torch.randn(tokens, 512, generator=generator).cuda().bfloat16().requires_grad_()
    head = (torch.randn(vocab, 512, generator=generator) * 0.5).cuda().bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator).cuda()
    assert chunks.keeps_logits(hidden.device, chunks.kept_bytes(tokens, vocab))
    logprobs, _ = token_logprobs(hidden, head, targets, exact=exact)
    with torch.no_grad():
        assert_bitwise(token_logprobs(hidden, head, targets, exact=exact)[0], logprobs.detach())
    remade, _ = token_logprobs(hidden, head, targets, exact=exact, chunk_size=1024)
    true = (hidden.double() @ head.double().t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    found, again, wanted = (gradients(x, (hidden, head, None)) for x in (logprobs, remade, true))
    assert_all_sqnr(found, wanted, 50.0)
    assert_all_sqnr(found, again, 50.0)


@pytest.mark.gpu
@EXACT
def test_memory_is_what_the_docstring_says(exact, generator) -> None:
    tokens, vocab = 8192, 128256
    hidden = torch.randn(tokens, 256, generator=generator).cuda().bfloat16().requires_grad_()
    head = torch.randn(vocab, 256, generator=generator).cuda().bfloat16().requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    token_logprobs(hidden[:128], head, targets[:128], exact=exact)[0].sum().backward()  # the libraries' workspaces
    hidden.grad = head.grad = None
    before = torch.cuda.memory_allocated()
    logprobs, _ = token_logprobs(hidden, head, targets, exact=exact, with_entropy=False)
    kept = chunks.kept_bytes(tokens, vocab)
    assert kept <= torch.cuda.memory_allocated() - before < kept + (16 << 20)
    torch.cuda.reset_peak_memory_stats()
    logprobs.sum().backward()
    # both gradients, one of them in fp32 too, and a chunk of the logits'
    assert torch.cuda.max_memory_allocated() - before < kept + chunks.MAX_CHUNK_BYTES + head.nbytes + 4 * hidden.nbytes
    assert torch.cuda.memory_allocated() - before < head.nbytes + hidden.nbytes + (16 << 20)
    assert logprobs.requires_grad  # the graph is still there
