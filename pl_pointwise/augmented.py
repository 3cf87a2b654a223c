"""The functions of violation and multiplier that formulations share, and their arguments."""

from __future__ import annotations

import inspect
import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def augmented(
    violation: Tensor, multiplier: Tensor, alpha: float | None, signed: bool = False
) -> Tensor:
    """λv for α None, else α(v + λ/2α)₊² − λ²/4α; of an equality, ``signed``, λv + αv².

    Where λ + 2αv > 0 the square equals λv + αv²; computed so, because subtracting the two large
    terms loses 6 % in float32 at α = 1e-6.
    """
    if alpha is None:
        return multiplier * violation
    active = multiplier * violation + alpha * violation.square()
    if signed:
        return active
    inactive = multiplier.square() / (-4 * alpha)
    return torch.where(multiplier + 2 * alpha * violation > 0, active, inactive)


def augmented_direction(
    violation: Tensor, multiplier: Tensor, alpha: float | None, signed: bool = False
) -> Tensor:
    """v for α None and for an equality, else max(v, −λ/2α)."""
    if alpha is None or signed:
        return violation + torch.zeros_like(multiplier)
    return torch.maximum(violation, -multiplier / (2 * alpha))


def number(
    owner: str,
    name: str,
    value: float,
    *,
    minimum: float | None = None,
    above: float | None = None,
) -> float:
    """``value`` as a plain float.

    Raises:
        ValueError: it is no finite number, or out of its range; names the owner's argument.
    """
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if valid and (minimum is None or value >= minimum) and (above is None or value > above):
        return float(value)
    bound = f"> {above:g}" if above is not None else f">= {minimum:g}"
    raise ValueError(f"{owner}({name}={value!r}): {name} must be a finite number {bound}.")


def optional_number(owner: str, name: str, value: float | None) -> float | None:
    """None, or a plain float > 0; see :func:`number`."""
    return None if value is None else number(owner, name, value, above=0.0)


def arguments_of(formulation: object) -> dict[str, Any]:
    """Its constructor's arguments, each from the attribute of its name; others are left out.

    Raises:
        ValueError: there is no such attribute.
    """
    kind = type(formulation)
    parameters = inspect.signature(kind).parameters.values()
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return dict(vars(formulation))
    missing = [p.name for p in parameters if not hasattr(formulation, p.name)]
    if missing:
        raise ValueError(
            f"{kind.__name__} must keep its argument {missing[0]} as an attribute of that name, "
            "from which YAML and checkpoints read it."
        )
    return {p.name: getattr(formulation, p.name) for p in parameters}
