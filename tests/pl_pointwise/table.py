"""The table of docs/formulations.md once more: the formulations that are trained, ψ as printed.

A new one has a row in FORMULATIONS, and what the page prints of it. Each is held against autograd
(test_formulations.py) and against training by hand (by_hand.py), which take nothing of ψ from the
package.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_pointwise import Average, CVaR, Penalty, Pointwise, Relaxed, Tilted

FORMULATIONS: dict[str, Any] = {
    "none": None,
    "penalty": Penalty(weight=0.7),
    "average": Average(dual_lr=0.5),
    "average augmented": Average(alpha=0.8, dual_lr=1.1),
    "tilted": Tilted(tilt=1.7, dual_lr=0.5),
    "tilted augmented": Tilted(tilt=3.0, alpha=0.8, dual_lr=0.6),
    "cvar": CVaR(level=0.6, threshold_lr=0.05, dual_lr=0.5),
    "cvar augmented": CVaR(level=0.4, threshold_lr=0.05, alpha=0.8, dual_lr=0.6),
    "pointwise": Pointwise(alpha=0.8, dual_lr=1.2),
    "pointwise standard": Pointwise(alpha=None, dual_lr=0.6),
    "relaxed": Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9),
    "relaxed linear": Relaxed(alpha=0.8, beta=0.6, cost="linear", dual_lr=0.9),
    "relaxed standard": Relaxed(alpha=None, beta=1.7, dual_lr=0.5),
    "by name": {
        "fit": Average(alpha=0.8, dual_lr=1.1),
        "pair": Relaxed(alpha=0.8, beta=0.6, cost="linear", dual_lr=0.9),
    },
}
KINDS = {
    name: FORMULATIONS[name]
    for name in (
        "none",
        "average augmented",
        "tilted",
        "cvar",
        "pointwise",
        "relaxed linear",
    )
}
"""One of each kind, for what does not depend on their branches."""


@dataclass
class Rule:
    """One formulation; ``beta`` is also the penalty's weight, the tilted mean's τ, the CVaR's p."""

    kind: str  # The class's name in small letters.
    alpha: float | None = None
    beta: float | None = None
    eta: float = 0.0
    linear_cost: bool = False
    threshold_lr: float = 0.0


STATISTICS: dict[str, Callable[[Rule, Tensor, Tensor, Tensor], Tensor]] = {
    "average": lambda rule, v, w, t: (w * v).sum(),
    "tilted": lambda rule, v, w, t: (
        torch.logsumexp(rule.beta * v + w.log(), 0) / rule.beta
    ),
    "cvar": lambda rule, v, w, t: (
        t + (w * (v - t).clamp(min=0)).sum() / (1 - rule.beta)
    ),
}
"""g of a batch with violations v of weights w, which sum to 1, and the threshold t."""
PARAMETER = {"penalty": "weight", "tilted": "tilt", "cvar": "level", "relaxed": "beta"}


def rule_of(formulation: Any) -> Rule | None:
    """What a formulation declares, by its class's name and its arguments."""
    if formulation is None:
        return None
    kind, given = type(formulation).__name__.lower(), vars(formulation)
    assert kind in (*STATISTICS, *PARAMETER, "pointwise"), (
        f"write ψ of {kind} here, as printed"
    )
    return Rule(
        kind,
        alpha=given.get("alpha"),
        beta=given.get(PARAMETER.get(kind, "")),
        eta=given.get("dual_lr", 0.0),
        linear_cost=given.get("cost") == "linear",
        threshold_lr=given.get("threshold_lr", 0.0),
    )


def psi(rule: Rule, v: Tensor, m: Tensor) -> Tensor:
    alpha, beta = rule.alpha, rule.beta
    if rule.kind == "penalty":
        return beta * v
    if alpha is None:
        return m * v if rule.kind != "relaxed" else m * v - m**2 / (4 * beta)
    square = (v + m / (2 * alpha)).clamp(min=0) ** 2
    plain = alpha * square - m**2 / (4 * alpha)
    if rule.kind != "relaxed":
        return plain
    if not rule.linear_cost:
        return alpha * beta / (alpha + beta) * square - m**2 / (4 * alpha)
    capped = beta * v - (m - beta) ** 2 / (4 * alpha)
    return torch.where(m + 2 * alpha * v > beta, capped, plain)


def ascent(rule: Rule, v: Tensor, m: Tensor, branches: Counter[str]) -> Tensor:
    alpha, beta = rule.alpha, rule.beta
    if alpha is None:
        return v if rule.kind != "relaxed" else v - m / (2 * beta)
    s = m + 2 * alpha * v
    branches["active"] += int((s > 0).sum())
    branches["inactive"] += int((s < 0).sum())
    plain = torch.where(s >= 0, v, -m / (2 * alpha))
    if rule.kind != "relaxed":
        return plain
    if rule.linear_cost:
        branches["capped"] += int((s > beta).sum())
        return torch.where(s > beta, (beta - m) / (2 * alpha), plain)
    return torch.where(s >= 0, (beta * v - m / 2) / (alpha + beta), -m / (2 * alpha))
