"""Counts, on the CPU, where a program would wait for a GPU.

Tensors are marked as being on the device: those that :meth:`Waits.move` gets, and whatever is
computed from them. What would make the host wait is written down with the line that did it:

    reading a marked tensor: item(), bool(), tolist(), numpy(), cpu(), torch.equal
    shapes that depend on values: nonzero, unique, indexing by a bool mask, repeat_interleave
    copying to the device and waiting for it: to(device) without non_blocking, tensor(device=)

The device is told from the host by its type: code names it by a ``torch.device``, the host "cpu".
What zeros(device=) and its like make counts as on the host until it meets a marked tensor.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]

READS = {"tolist", "numpy", "__array__", "cpu"}
BY_VALUE = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "equal", "bincount", "item",
}  # fmt: skip


OF_THE_HOST = ("pl_pointwise/report/history.py", "pl_pointwise/lagrangian/prices.py")
"""They read what steps measured, which is on the CPU: also of steps before the count began, whose
tensors may lie where one of the device was."""


class Waits:
    """Where a program waited: see the top."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._on_device: dict[int, bool] = {}

    def move(self, value: Any, on_device: bool = True) -> None:
        """Marks all tensors in a value."""
        for each in tree_leaves(value):
            if isinstance(each, Tensor):
                self.mark(each, on_device)

    def mark(self, tensor: Tensor, on_device: bool) -> None:
        self._on_device[tensor.untyped_storage()._cdata] = on_device

    def is_marked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self._on_device.get(
            value.untyped_storage()._cdata, False
        )

    def note(self, what: str) -> None:
        """The innermost line of the project's own code that is running."""
        if any(
            frame.filename.endswith(OF_THE_HOST) for frame in traceback.extract_stack()
        ):
            return
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            own = path.is_relative_to(ROOT) and "tests" not in path.parts
            if own and not any(part.startswith(".venv") for part in path.parts):
                if "history." in (frame.line or ""):
                    return
                self.found.append(f"{path.relative_to(ROOT)}: {what}: {frame.line}")
                return
        self.found.append(f"elsewhere: {what}")


class _Calls(TorchFunctionMode):
    """What Python asks of tensors: where it is a copy between host and device, a real one."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, waits = kwargs or {}, self.waits
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in READS and waits.is_marked(first):
            waits.note(name)
            if name == "cpu":
                copied = first.clone()
                waits.mark(copied, False)
                return copied
        given = [*args[1:], *kwargs.values()]
        device = any(isinstance(each, torch.device) for each in given)
        device |= any(
            isinstance(each, Tensor) and waits.is_marked(each) for each in given[:1]
        )
        result = func(*args, **kwargs)
        if name == "to" and device and not waits.is_marked(first):
            if not kwargs.get("non_blocking", False):
                waits.note("to(device)")
            result = result.clone() if result is first else result
            waits.mark(result, True)
        on_device = isinstance(kwargs.get("device"), torch.device)
        if name in ("tensor", "as_tensor"):
            if on_device:
                waits.note("tensor(device=)")
            waits.mark(result, on_device)
        return result


class _Operations(TorchDispatchMode):
    """What is computed from marked tensors is marked."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, waits = kwargs or {}, self.waits
        given = [
            each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        ]
        marked = any(map(waits.is_marked, given))
        name = func._schema.name.partition("::")[2]
        if marked and (
            name in BY_VALUE or _depends_on_values(name, args, kwargs, waits)
        ):
            waits.note(name)
        known = {each.untyped_storage()._cdata for each in given}
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in known:
                waits.mark(each, marked)
            elif isinstance(each, Tensor) and marked:
                waits.mark(each, True)
        return result


def _depends_on_values(
    name: str, args: Any, kwargs: dict[str, Any], waits: Waits
) -> bool:
    if name in ("index", "index_put", "index_put_"):
        indices = [each for each in args[1] if isinstance(each, Tensor)]
        return any(each.dtype in (torch.bool, torch.uint8) for each in indices)
    if name == "repeat_interleave":
        counts = args[1] if len(args) > 1 else args[0]
        return isinstance(counts, Tensor) and kwargs.get("output_size") is None
    return False


def step_waits(module: Any, fit: Callable[[], None], step: int = 1) -> list[str]:
    """Where one step of a fit waits, without the steps before it, in which things are found out.

    The module's weights and what it moves of a batch are on the device.
    """
    waits, steps = Waits(), []
    plain_step, move = module.training_step, module.transfer_batch_to_device

    def moved(batch: Any, device: torch.device, place: int) -> Any:
        found = move(batch, device, place)
        for each in found if isinstance(found, list) else [found]:
            for key, value in each.items():
                # Also what stays: its memory may have been a marked tensor's before.
                waits.move(value, on_device=key not in module.host_keys)
        return found

    def training_step(batch: Any, batch_idx: int) -> Any:
        steps.append(batch_idx)
        if len(steps) != step + 1:
            return plain_step(batch, batch_idx)
        waits.move([*module.parameters(), *module.buffers()])
        with _Calls(waits), _Operations(waits):
            return plain_step(batch, batch_idx)

    module.training_step, module.transfer_batch_to_device = training_step, moved
    fit()
    assert len(steps) > step
    return waits.found
