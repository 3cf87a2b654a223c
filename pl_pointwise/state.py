"""What a checkpoint may hold: plain values, and the random state of every rank."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch

from .formulations import Formulation


def plain(value: Any) -> Any:
    """``value`` out of dicts, lists, strings, numbers and None, so that it loads weights-only.

    Formulations become ``{class_path, init_args}``, dataclasses dicts, paths strings, numpy scalars
    numbers. Anything else has no plain form and becomes ``None``.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Formulation):
        return plain(value.config())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Namespace):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(entry) for entry in value]
    if isinstance(value, (np.generic, torch.Tensor)) and value.ndim == 0:
        return plain(value.item())
    if isinstance(value, (Path, str)):
        return str(value)
    if isinstance(value, (bool, int, float)):
        return plain(float(value) if isinstance(value, float) else int(value))
    return None


Settings = TypeVar("Settings")


def from_plain(kind: type[Settings], value: Settings | Mapping[str, Any]) -> Settings:
    """The dataclass behind its plain form, those among its fields included; see :func:`plain`.

    An object passes through, so that a constructor takes what a checkpoint's hyperparameters hold.
    """
    if not isinstance(value, Mapping):
        return value
    hints = get_type_hints(kind)
    nested = {f.name: hints[f.name] for f in fields(kind) if is_dataclass(hints[f.name])}  # type: ignore[arg-type]
    return kind(**{k: from_plain(nested[k], v) if k in nested else v for k, v in value.items()})


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators, as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],  # type: ignore[attr-defined]
        "torch": torch.get_rng_state(),
    }
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
