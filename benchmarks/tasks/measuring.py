"""What trained members violate and pay, on the samples and on unseen ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .rivals import group_means
from .task import Parameters, Task

TOGETHER = 40_000
"""Values of a member times members that are computed together."""


def measure(task: Task, parameters: Parameters) -> dict[str, list[float]]:
    """Of each member, by what is measured.

    "violated": the share of samples (of groups) that miss a bound by more than its slack; "size":
    the mean of (v)₊, in the scale of each constraint; "objective": the mean of ℓ₀, or the error;
    "gap": how far it is above the "optimum", as a share of it. Of unseen rows the same with "new ".
    """
    found = _measured(task, parameters, range(task.samples), "")
    if task.error is not None:
        found["objective"] = task.error(parameters)
    if task.least is not None:
        found["optimum"] = torch.full_like(found["objective"], task.least)
        found["gap"] = (found["objective"] - task.least) / abs(task.least)
    if task.unseen:
        found |= _measured(task, parameters, task.unseen, "new ")
        if task.error is not None:
            del found["new objective"]
    return {
        name: [float(f"{each:.6g}") for each in of.tolist()]
        for name, of in found.items()
    }


def _measured(
    task: Task, parameters: Parameters, rows: range, prefix: str
) -> dict[str, Tensor]:
    members = len(next(iter(parameters.values())))
    together = max(1, TOGETHER // len(rows))
    parts = []
    for start in range(0, members, together):
        part = {
            name: value[start : start + together] for name, value in parameters.items()
        }
        parts.append(_of_part(task, part, rows))
    return {
        prefix + name: torch.cat([part[name] for part in parts]) for name in parts[0]
    }


def _of_part(task: Task, parameters: Parameters, rows: range) -> dict[str, Tensor]:
    """(M,) each."""
    members = len(next(iter(parameters.values())))
    index = torch.tensor(rows).expand(members, -1)
    with torch.no_grad():
        objective, values = task.terms(parameters, index)
        missed, sizes = [], []
        for name, violation in task.residuals(values).items():
            worst, counts = _worst(task, name, violation, index)
            # NaN is violated.
            missed.append((~(worst <= task.slack[name])).float()[:, counts])
            sizes.append(worst.clamp(min=0)[:, counts])
        applies = task.applies("objective", index[0])
        objective = objective if applies is None else objective[:, applies]
    return {
        "violated": torch.cat(missed, 1).mean(1),
        "size": torch.cat(sizes, 1).mean(1),
        "objective": objective.mean(1),
    }


def _worst(
    task: Task, name: str, violation: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """The worst column of each sample (M, B), or of each group's mean, in its scale.

    And which of them count, bool (B,).
    """
    applies = task.applies(name, index)
    if task.groups is not None:
        number = int(task.groups.max()) + 1
        violation, applies = group_means(violation, applies, task.groups[index], number)
    if task.constraints[name].equals is not None:
        violation = violation.abs()
    counts = (
        torch.ones(violation.shape[1], dtype=torch.bool)
        if applies is None
        else applies[0]
    )
    counts = counts if task.counted is None else counts & task.counted[index[0]]
    worst = violation.amax(2) / task.scale.get(name, 1.0)
    return worst, counts
