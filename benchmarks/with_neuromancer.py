"""neuromancer's augmented Lagrangian on the problems of families.py, with the same network."""

from __future__ import annotations

import torch
from families import BATCH, PROBLEMS, RATE
from torch.utils.data import DataLoader, TensorDataset

from pl_pointwise.tasks.family.family import Proxy, problems, split_of

FAMILY = PROBLEMS["convex"].family
RATES = {"mu_init": 3.0, "mu_max": 3.0, "inner_loop": 1}
"""By the validation instances, of ten choices (README.md)."""


def trained_by_neuromancer(epochs: int, seed: int) -> Proxy:
    """With loss.py line 333 mended to `self.mu[input_dict["index"]]`: it took no mini-batches."""
    from neuromancer.constraint import variable
    from neuromancer.loss import AugmentedLagrangeLoss
    from neuromancer.problem import Problem
    from neuromancer.system import Node

    torch.manual_seed(seed)
    x, proxy = problems(FAMILY).x[split_of(FAMILY)["train"]].float(), Proxy(FAMILY, "completion")
    y = variable("y")
    terms = [variable([y], proxy.objective).minimize()], [y @ proxy.G.T <= proxy.h]
    loss = AugmentedLagrangeLoss(*terms, DataLoader(TensorDataset(x)), **RATES)
    problem = Problem([Node(proxy, ["x"], ["y"], name="proxy")], loss)
    optimizer = torch.optim.AdamW(proxy.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * -(-len(x) // BATCH))
    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            batch = {"x": x[rows], "index": rows, "epoch": epoch, "name": "train"}
            optimizer.zero_grad()
            problem(batch)["train_loss"].backward()
            optimizer.step()
            schedule.step()
    return proxy.eval()
