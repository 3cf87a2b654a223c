"""What a beginner's slip in a task's own methods is told as, instead of torch's error."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError
from ..task import Task

METHODS = ("forward", "objective", "constraint_values", "membership", "strict_values")
"""What a task writes and a step calls."""


def explain_own_error(task: Task, batch: Any, error: Exception) -> None:
    """Says in a task's terms what went wrong in its methods, where that is known for sure.

    Raises:
        TrainingError: cause and remedy; of any other error nothing is raised.
    """
    slips = (TypeError, AttributeError, RuntimeError, ValueError)
    # Ours say it already, and a KeyError or a file that is not there says by itself what is
    # missing.
    if isinstance(error, TrainingError) or not isinstance(error, slips):
        return
    words = _in_words(task, batch, error)
    if words is not None:
        first_line = str(error).partition("\n")[0]
        raise TrainingError(f"{words} ({first_line})") from error


def _in_words(task: Task, batch: Any, error: Exception) -> str | None:
    """Cause and remedy of a slip that is known; None of any other error."""
    method = _method_of(task, error)
    if method is None:
        return None
    name, frame = method
    if isinstance(batch, (list, tuple)) and batch:  # Micro-batches, all alike.
        batch = batch[0]
    fields = [*batch] if isinstance(batch, Mapping) else []
    if _took_a_dict(error) and name == "forward" and fields:
        return _on_a_dict(task, fields)
    if (
        "NoneType" in str(error)
        and name != "forward"
        and _first_argument(frame) is None
    ):
        return (
            f"forward() of {type(task).__name__} returned None, which {name}() was then given. Is "
            "its return missing?"
        )
    wide = _wide_fields(batch)
    about_dtype = isinstance(error, RuntimeError) and "double" in str(error).lower()
    no_wide_weight = all(weight.dtype != torch.float64 for weight in task.parameters())
    if wide and about_dtype and no_wide_weight:
        return (
            f'batch["{wide[0]}"] is in float64, as arrays of numpy are, and the weights are not. '
            "Give rows in float32: torch.as_tensor(values, dtype=torch.float32)."
        )
    return None


def _on_a_dict(task: Task, fields: Sequence[Any]) -> str:
    """On a ``forward`` that takes the batch for a tensor."""
    first_argument = [*inspect.signature(type(task).forward).parameters][1:2]
    shown = next((field for field in fields if field != "index"), fields[0])
    return (
        f"forward({', '.join(['self', *first_argument])}) of {type(task).__name__} was given the "
        f"whole batch, a dict of {', '.join(map(str, fields))}. Where it takes that for a tensor, "
        "write forward(self, batch), and take from it what the model reads, such as "
        f'batch["{shown}"].'
    )


def _took_a_dict(error: Exception) -> bool:
    """Whether torch or Python says of an operand, an argument or an owner that it is a dict."""
    kind = isinstance(error, (TypeError, AttributeError))
    return kind and re.search(r"'dict'|not dict\b|got dict\b", str(error)) is not None


def _method_of(task: Task, error: Exception) -> tuple[str, FrameType] | None:
    """The last of a task's own methods that an error came through, and its frame."""
    last = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        names = frame.f_code.co_varnames
        of_task = bool(names) and frame.f_locals.get(names[0]) is task
        if of_task and frame.f_code.co_name in METHODS:
            last = frame.f_code.co_name, frame
        trace = trace.tb_next
    return last


def _first_argument(frame: FrameType) -> Any:
    """What a method was given as the first argument after ``self``."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[1]) if frame.f_code.co_argcount > 1 else ()


def _wide_fields(batch: Any) -> list[str]:
    """Entries of a batch that are float64 tensors."""
    if not isinstance(batch, Mapping):
        return []
    wide = []
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            wide.append(str(name))
    return wide
