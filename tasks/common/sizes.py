"""Sizes that come again, because on a CPU every new one costs memory that stays.

oneDNN, which computes torch's matrix products there, makes code for each shape it meets and keeps
it: about 0.7 MB and a millisecond a shape, for a thousand shapes and more. Rows of tokens are
seldom equally long twice, so each step of training brought some seventy new shapes; and the lumps
that stayed, between tensors that came and went, kept the heap from being used again. Over ten steps
of a model of 26 million parameters a process grew from 1.0 to 2.0 GiB.

So rows are filled up to one of few sizes, and what the filling gives is cut off again.
"""

from __future__ import annotations

import torch

ATTENTION_BLOCK = 32  # queries that torch's attention takes at a time


def recurring(size: int, device: torch.device) -> int:
    """The size to fill a row of ``size`` tokens up to: at most 1/16 more, 16 sizes an octave.

    Anywhere but on a CPU, ``size`` itself.
    """
    return (
        size if device.type != "cpu" else _next_multiple(size, 2 ** max(0, size.bit_length() - 5))
    )


def recurring_in_attention(size: int, device: torch.device, block: int = ATTENTION_BLOCK) -> int:
    """Likewise for queries or keys, of which there are many small numbers: whole blocks."""
    return size if device.type != "cpu" else _next_multiple(size, block)


def _next_multiple(size: int, step: int) -> int:
    return -(-size // step) * step
