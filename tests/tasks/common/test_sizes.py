"""Rows are filled up to few sizes, never by much."""

from __future__ import annotations

import torch

from pl_pointwise.tasks.common.sizes import recurring, recurring_in_attention

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_sizes_are_few_and_near() -> None:
    filled = {size: recurring(size, CPU) for size in range(1, 4097)}
    assert all(size <= full <= size * (1 + 1 / 16) for size, full in filled.items())
    for octave in (32, 256, 2048):
        sizes = {filled[size] for size in range(octave + 1, 2 * octave + 1)}
        assert len(sizes) == 16


def test_a_recurring_size_stays_as_it_is() -> None:
    for size in range(1, 3000):
        assert recurring(recurring(size, CPU), CPU) == recurring(size, CPU)


def test_attention_takes_whole_blocks() -> None:
    assert [recurring_in_attention(size, CPU) for size in (1, 31, 32, 33)] == [32, 32, 32, 64]


def test_a_gpu_computes_no_filling() -> None:
    assert recurring(1747, GPU) == recurring_in_attention(1747, GPU) == 1747
