"""The algorithm once more, as a plain loop in float64, written from the method's definition.

Nothing here comes from the package. ψ is the printed square (table.py); gradients with respect to
the weights come from autograd through it, the mean of the batch included; ∂ψ/∂λ is the printed
column. The one concession: λ is rounded to float32 after each dual step, as the store rounds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.pl_pointwise.table import STATISTICS, Rule, ascent, psi
from tests.pl_pointwise.toy import PAIRS, ToyRows, initial_weights


@dataclass
class Outcome:
    weights: Tensor
    multipliers: dict[str, Tensor]
    thresholds: dict[str, list[Tensor]]
    branches: Counter[str] = field(default_factory=Counter)


def stepped(rule: Rule, v: Tensor, m: Tensor, branches: Counter[str]) -> Tensor:
    moved = m + rule.eta * ascent(rule, v, m, branches)
    branches["projected"] += int((moved < 0).sum())
    return moved.clamp(min=0).float().double()


def run(
    rows: ToyRows,
    batches: list[tuple[int, list[int]]],
    rules: dict[str, Rule | None],
    bounds: dict[str, tuple[float | None, float | None]],
    *,
    learning_rate: float,
    order: str = "simultaneous",
    primal_steps: int = 1,
    clip: float | None = None,
    strict: Callable[[Tensor], dict[str, Tensor]] | None = None,
) -> Outcome:
    """Trains over the given batches, each an epoch and the indices of its samples.

    bounds: by constraint, (upper, lower), either None.
    strict: of outputs the values by constraint that the multipliers follow; None, or a constraint
        left out: those that the weights follow.
    """
    first, last = (w.clone().requires_grad_() for w in initial_weights())
    branches: Counter[str] = Counter()
    # λ by constraint and side: one number, or a table by sample.
    store: dict[str, list[Tensor]] = {}
    thresholds: dict[str, list[Tensor]] = {}
    for name, (upper, lower) in bounds.items():
        rule = rules.get(name)
        sides = (upper is not None) + (lower is not None)
        if rule is not None and rule.kind in ("pointwise", "relaxed"):
            width = PAIRS if name == "pair" else 1
            store[name] = [
                torch.zeros(len(rows), width, dtype=torch.float64) for _ in range(sides)
            ]
        elif rule is not None and rule.kind in STATISTICS:
            store[name] = [torch.zeros((), dtype=torch.float64) for _ in range(sides)]
            thresholds[name] = [
                torch.zeros((), dtype=torch.float64) for _ in range(sides)
            ]

    # Batch, violations of each side, and the figure each side of the batch came to.
    window: list[
        tuple[list[int], dict[str, list[Tensor]], dict[str, list[Tensor | None]]]
    ] = []

    def close_window() -> None:
        for name, rule in rules.items():
            if rule is None or rule.kind == "penalty":
                continue
            for side, table in enumerate(store[name]):
                if rule.kind in STATISTICS:
                    seen = [came_to[name][side] for *_, came_to in window]
                    seen = [one for one in seen if one is not None]
                    if seen:
                        mean = sum(seen) / len(seen)
                        store[name][side] = stepped(rule, mean, table, branches)
                    continue
                latest = {}
                for batch, v, _ in window:
                    for row, sample in enumerate(batch):
                        if carries(name, sample).any():
                            latest[sample] = v[name][side][row]
                for sample, v_sample in latest.items():
                    moved = stepped(rule, v_sample, table[sample], branches)
                    table[sample] = torch.where(
                        carries(name, sample), moved, table[sample]
                    )
        window.clear()

    def carries(name: str, sample: int) -> Tensor:
        return rows.has[name][sample].reshape(-1)

    def weighted(name: str, v: Tensor, batch: list[int]) -> tuple[Tensor, Tensor]:
        """The violations somebody carries and their weights; every carrier weighs the same."""
        found, shares = [], []
        for row, sample in enumerate(batch):
            mask = carries(name, sample)
            if mask.any():
                found.append(v[row][mask])
                shares.append(mask[mask].double() / int(mask.sum()))
        if not found:
            return torch.zeros(0), torch.zeros(0)
        return torch.cat(found), torch.cat(shares) / len(found)

    def figure_of(
        rule: Rule, name: str, side: int, v: Tensor, batch: list[int]
    ) -> Tensor | None:
        found, shares = weighted(name, v, batch)
        if not len(found):
            return None
        return STATISTICS[rule.kind](rule, found, shares, thresholds[name][side])

    for _, batch in batches:
        x, y = rows.x[batch], rows.y[batch]
        z = torch.tanh(x @ first) @ last
        values = {"fit": z[:, None], "pair": z[:, None] * x[:, :PAIRS]}
        judged = values | ({} if strict is None else strict(z))
        v: dict[str, list[Tensor]] = {}
        fixed: dict[str, list[Tensor]] = {}
        for found, of in ((v, values), (fixed, judged)):
            for name, (upper, lower) in bounds.items():
                found[name] = [] if upper is None else [of[name] - upper]
                found[name] += [] if lower is None else [lower - of[name]]
        fixed = {
            name: [side.detach() for side in sides] for name, sides in fixed.items()
        }
        came_to = {
            name: [
                figure_of(rule, name, i, side, batch)
                for i, side in enumerate(fixed[name])
            ]
            for name, rule in rules.items()
            if rule is not None and rule.kind in STATISTICS
        }
        window.append((batch, fixed, came_to))

        if order == "dual_first":
            close_window()
        carried = rows.has["objective"][batch]
        loss = ((z - y)[carried] ** 2).mean() if carried.any() else 0.0 * z.sum()
        for name, rule in rules.items():
            if rule is None:
                continue
            for side in range(len(v[name])):
                if rule.kind in STATISTICS:
                    one = figure_of(rule, name, side, v[name][side], batch)
                    if one is not None:
                        loss = loss + psi(rule, one, store[name][side])
                    continue
                m = torch.zeros_like(v[name][side])
                if rule.kind != "penalty":
                    m = store[name][side][batch]
                found, shares = weighted(name, psi(rule, v[name][side], m), batch)
                loss = loss + (shares * found).sum()
        gradients = torch.autograd.grad(loss, [first, last])
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        factor = 1.0 if clip is None else min(1.0, clip / float(norm))
        with torch.no_grad():
            for weight, gradient in zip((first, last), gradients, strict=True):
                weight -= learning_rate * factor * gradient
        if order == "simultaneous" and len(window) == primal_steps:
            close_window()
        for name, rule in rules.items():
            for side in range(len(fixed[name]) if rule and rule.kind == "cvar" else 0):
                found, shares = weighted(name, fixed[name][side], batch)
                if len(found):
                    above = shares[found > thresholds[name][side]].sum()
                    branches["above"] += int((found > thresholds[name][side]).sum())
                    branches["below"] += int((found < thresholds[name][side]).sum())
                    moved = thresholds[name][side] - rule.threshold_lr * (
                        1 - above / (1 - rule.beta)
                    )
                    thresholds[name][side] = moved.float().double()

    multipliers = {}
    for name, sides in store.items():
        if sides[0].dim() == 0:
            multipliers[name] = sides[0] if len(sides) == 1 else torch.stack(sides)
        else:
            multipliers[name] = torch.cat(sides, dim=1)
    weights = torch.cat([first.detach().flatten(), last.detach().flatten()])
    return Outcome(weights, multipliers, thresholds, branches)
