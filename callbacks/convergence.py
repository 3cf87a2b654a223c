"""How far a constrained problem is from its optimum, summed over the dual steps of an epoch.

Of a constraint v ≤ u, with u the relaxation u* that a formulation takes (0 where it has none), an
optimum asks for v ≤ u (feasibility) and λ(v − u) = 0 (complementary slackness).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_pointwise.module import PointwiseModule
from pl_pointwise.step import DualStep


class Convergence:
    """The dual steps of an epoch in a few sums per constraint: O(batch) a step, no sample is kept.

    With r = v − u*, of the λ after the step, over the entries (sample and column) that stepped:

    ====================== ========================================================
    ``step``               mean ``|Δλ|``
    ``slackness``          mean ``|λr|``
    ``infeasibility_mean`` mean (r)₊
    ``infeasibility_max``  max (r)₊
    ``relaxed``            share with u* > 0; only where the formulation relaxes
    ====================== ========================================================

    Of an equality r has either sign, and |r| stands for (r)₊.

    A constraint with one multiplier is met by a statistic of the batch, such as its mean, which
    varies from batch to batch; so r is averaged over the epoch's steps before it is measured.
    """

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Tensor]] = {}

    def add(self, module: PointwiseModule) -> None:
        """Adds the dual steps of the module's last training step, if it took any."""
        for name, step in module.dual_steps.items():
            formulation = module.in_force(name)
            relaxation = getattr(formulation, "relaxation", None)
            relaxed = None if relaxation is None else relaxation(step.judged, step.after)
            found = _of_samples(step, relaxed) if step.index is not None else _of_statistic(step)
            found |= {} if step.index is not None else {"signed": torch.tensor(formulation.signed)}
            if formulation.signed and step.index is not None:
                found |= _of_equality(step, relaxed)
            found = {key: value.to(torch.float64) for key, value in found.items()}
            known = self.sums.setdefault(name, {})
            for key, value in found.items():
                if key in ("multiplier", "infeasibility_max"):
                    largest = torch.maximum(known[key], value) if key in known else value
                    known[key] = value if key == "multiplier" else largest
                else:
                    known[key] = known[key] + value if key in known else value

    def figures(self) -> dict[str, dict[str, float]]:
        """By constraint, the figures of the class docstring; none where nothing stepped."""
        return {
            name: {key: float(value) for key, value in _figures(sums).items()}
            for name, sums in self.sums.items()
        }


def _of_samples(step: DualStep, relaxed: Tensor | None) -> dict[str, Tensor]:
    residual = (step.judged if relaxed is None else step.judged - relaxed)[step.mask]
    excess = residual.clamp(min=0)
    found = {
        "entries": step.mask.sum(),
        "step": (step.after - step.before)[step.mask].abs().sum(),
        "slackness": (step.after[step.mask] * residual).abs().sum(),
        "infeasibility_mean": excess.sum(),
        "infeasibility_max": excess.max(),
    }
    return found if relaxed is None else found | {"relaxed": (relaxed[step.mask] > 0).sum()}


def _of_equality(step: DualStep, relaxed: Tensor | None) -> dict[str, Tensor]:
    """What an optimum asks of r = 0 with λ and u* of either sign: |r| itself, λr nothing more."""
    residual = (step.judged if relaxed is None else step.judged - relaxed)[step.mask].abs()
    found = {"infeasibility_mean": residual.sum(), "infeasibility_max": residual.max()}
    return found if relaxed is None else found | {"relaxed": (relaxed[step.mask] != 0).sum()}


def _of_statistic(step: DualStep) -> dict[str, Tensor]:
    return {
        "entries": torch.tensor(step.judged.shape[1]),
        "steps": torch.tensor(1),
        "step": (step.after - step.before).abs().sum(),
        "statistic": step.judged[0],
        "multiplier": step.after[0],
    }


def _figures(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    if "statistic" not in sums:
        mean = {k: v / sums["entries"] for k, v in sums.items() if k != "entries"}
        return mean | {"infeasibility_max": sums["infeasibility_max"]}
    residual = sums["statistic"] / sums["steps"]
    excess = residual.abs() if sums.get("signed") else residual.clamp(min=0)
    return {
        "step": sums["step"] / sums["entries"],
        "slackness": (sums["multiplier"] * residual).abs().mean(),
        "infeasibility_mean": excess.mean(),
        "infeasibility_max": excess.max(),
    }
