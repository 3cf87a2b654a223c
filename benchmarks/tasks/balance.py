"""Three streams leave a vessel: their mass and their heat must add up, in units of 1 and 1,000."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pl_pointwise import Constraint

from .task import Parameters, Task, Terms, layers, network

SAMPLES, NEW, UNIT = 150, 2000, 1000.0
SLACK = 0.02


def balance() -> Task:
    """Flows and temperatures are learned from noisy data, the two sums are known."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(SAMPLES + NEW, 5, generator=generator) - 1
    turned = x @ torch.randn(5, 6, generator=generator)
    flow = softplus(turned[:, :3])
    warmth = 1 + 0.5 * torch.sin(turned[:, 3:])
    mass, heat = flow.sum(1), (flow * warmth).sum(1)
    target = torch.cat([flow, warmth], 1)
    target[:SAMPLES] += 0.15 * torch.randn(SAMPLES, 6, generator=generator)

    def terms(parameters: Parameters, index: Tensor) -> Terms:
        found = network(parameters, x[index])
        flows, warmths = softplus(found[..., :3]), 1 + found[..., 3:]
        error = (torch.cat([flows, warmths], 2) - target[index]).square().mean(2)
        off = {"mass": flows.sum(2) - mass[index]}
        off["heat"] = UNIT * ((flows * warmths).sum(2) - heat[index])
        return error, off

    return Task(
        SAMPLES,
        lambda generator: layers(generator, 5, 32, 32, 6),
        terms,
        {"mass": Constraint(equals=0.0), "heat": Constraint(equals=0.0)},
        {"mass": SLACK, "heat": SLACK},
        scale={"mass": 1.0, "heat": UNIT},
        unseen=range(SAMPLES, len(x)),
        grid=({"mass": 1.0, "heat": 1 / UNIT},),
    )
