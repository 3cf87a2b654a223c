"""The states of random generators: Python's, numpy's, torch's, and a loader's own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .training_set import sampler_of


def random_state(device: torch.device | None = None) -> dict[str, Any]:
    """The state of this process's generators, as plain values and tensors."""
    of_numpy: Any = np.random.get_state()
    kind, keys, *rest = of_numpy
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": [kind, keys.tolist(), *rest],
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts the generators back to a state of :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The random generators of a loader's own, and its sampler's; none of one with a state."""
    if hasattr(loader, "load_state_dict"):
        return []
    generators = []
    for part in (loader, sampler_of(loader)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generators.append(generator)
    return generators
