"""Batches: a pure function of (seed, step), windows without gaps, document boundaries where the text has them."""

import numpy as np
import torch

from octavo.train.data import IGNORED, Batch, Sampler, make_batch, validation_batches

EOS = 0


def stream(num_tokens: int, document_len: int = 10) -> np.ndarray:
    tokens = np.arange(1, num_tokens + 1, dtype=np.uint16)
    tokens[document_len - 1 :: document_len] = EOS
    return tokens


def sampler(tokens: np.ndarray, **fields: object) -> Sampler:
    settings = {"seq_len": 8, "batch_size": 4, "num_micro_batches": 1, "seed": 0, "eos_id": EOS} | fields
    return Sampler(tokens=tokens, **settings)


def starts(batches: list[Batch], seq_len: int = 8) -> list[int]:
    return [int(i) for batch in batches for i in batch.input_ids.view(-1, seq_len)[:, 0]]


def test_boundaries_and_targets() -> None:
    batch = make_batch([np.array([5, 6, 0, 7, 8]), np.array([9, 0, 1])], eos_id=0)
    assert batch.input_ids.tolist() == [5, 6, 0, 7, 9, 0]
    assert batch.targets.tolist() == [6, 0, IGNORED, 8, 0, IGNORED]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.num_targets == 4
    assert {batch.input_ids.dtype, batch.targets.dtype, batch.cu_seqlens.dtype} == {torch.int64}


def test_without_boundaries() -> None:
    batch = make_batch([np.array([5, 6, 0, 7, 8]), np.array([9, 0, 1])], eos_id=None)
    assert batch.targets.tolist() == [6, 0, 7, 8, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.num_targets == 6


def test_step_is_a_pure_function_of_seed_and_step() -> None:
    tokens = stream(1000)
    forward = [starts(sampler(tokens).batches(step)) for step in range(50)]
    backward = [starts(sampler(tokens).batches(step)) for step in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [starts(sampler(tokens, seed=1).batches(step)) for step in range(50)]


def test_order_never_changes_between_versions() -> None:
    tokens = np.arange(81, dtype=np.uint16)
    assert starts(sampler(tokens, batch_size=10).batches(0)) == [0, 72, 8, 48, 24, 40, 32, 16, 64, 56]


def test_each_epoch_covers_every_window_once_in_an_order_of_its_own() -> None:
    tokens = np.arange(12 * 8 + 5, dtype=np.uint16)  # 12 windows and a tail
    steps = [starts(sampler(tokens).batches(step)) for step in range(9)]
    epochs = [[*steps[i], *steps[i + 1], *steps[i + 2]] for i in (0, 3, 6)]
    assert all(sorted(epoch) == [8 * i for i in range(12)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_micro_batches_cut_the_same_sequences() -> None:
    tokens = stream(1000)
    whole, halves = sampler(tokens).batches(5), sampler(tokens, num_micro_batches=2).batches(5)
    assert torch.equal(whole[0].input_ids, torch.cat([half.input_ids for half in halves]))
    assert torch.equal(whole[0].targets, torch.cat([half.targets for half in halves]))
    assert whole[0].num_targets == sum(half.num_targets for half in halves)


def test_one_window_is_enough() -> None:
    assert starts(sampler(stream(9), batch_size=2).batches(7)) == [1, 1]


def test_large_ids_survive() -> None:
    batch = make_batch([np.array([70_000, 2**31, 3], dtype=np.uint32)], eos_id=EOS)
    assert batch.input_ids.tolist() == [70_000, 2**31]


def test_validation_is_the_stream_in_order() -> None:
    tokens = stream(101)
    for limit, expected in ((0, 100), (64, 64), (50, 50), (1000, 100)):
        batches = list(validation_batches(tokens, seq_len=8, batch_size=3, eos_id=EOS, max_tokens=limit))
        inputs = torch.cat([batch.input_ids for batch in batches])
        assert inputs.tolist() == tokens[:expected].tolist()
        following = torch.cat([batch.targets for batch in batches])
        assert following[following != IGNORED].tolist() == tokens[1 : expected + 1][inputs.numpy() != EOS].tolist()
