"""The random state of this process: Python's, numpy's and torch's generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def generator_states() -> tuple[Any, Any, Tensor]:
    """Those of Python, numpy and torch on the CPU, as they give them."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def plain_random_state(python: Any, numbers: Any, torch_state: Tensor) -> dict[str, Any]:
    """What :func:`generator_states` gives, as plain values and a tensor."""
    kind, keys, *rest = numbers
    return {"python": python, "numpy": [kind, keys.tolist(), *rest], "torch": torch_state}


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators, as plain values and tensors."""
    state = plain_random_state(*generator_states())
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def replayed_random_state(device: torch.device) -> Iterator[None]:
    """Runs the block, then puts torch's generators back, so that what follows draws the same."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
