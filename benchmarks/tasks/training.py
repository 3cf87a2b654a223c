"""Trains all methods and seeds of a task at once, and measures each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .measuring import measure
from .methods import Rival, method
from .rivals import Rivals
from .rule import Rules
from .task import Parameters, Task

Member = tuple[str, int]
"""A method and a seed."""
MOST = 128
"""Members that are trained together: more are slower, as they do not stay in the cache."""


def runs(
    task: Task, methods: Sequence[str], seeds: Sequence[int], epochs: int
) -> list[dict[str, Any]]:
    """A row of each method and seed: what :func:`measure` finds after so many epochs."""
    members = list(product(methods, seeds))
    of_rule = [each for each in members if not isinstance(method(each[0]), Rival)]
    rivals = [each for each in members if isinstance(method(each[0]), Rival)]
    parts = [of_rule] if of_rule else []
    parts += [rivals[start : start + MOST] for start in range(0, len(rivals), MOST)]
    rows = []
    for part in parts:
        parameters = train(task, part, epochs)
        measured = measure(task, parameters)
        for place, (name, seed) in enumerate(part):
            found = {key: value[place] for key, value in measured.items()}
            rows.append({"epochs": epochs, "method": name, "seed": seed} | found)
    return rows


def train(task: Task, members: Sequence[Member], epochs: int) -> Parameters:
    """The trained parameters of all members, which are all of the rule or all rivals."""
    of = [method(name) for name, _ in members]
    parameters = started(task, [seed for _, seed in members])
    optimizer = torch.optim.Adam(parameters.values(), lr=task.rate, foreach=True)
    orders = Orders(task, [seed for _, seed in members])
    steps, step = epochs * orders.steps, 0
    followed: Rivals | Rules
    if isinstance(of[0], Rival):
        followed = Rivals(task, of)  # type: ignore[arg-type]
    else:
        followed = Rules(task, of, steps)  # type: ignore[arg-type]
    for _ in range(epochs):
        for index in orders.epoch():
            for group in optimizer.param_groups:
                group["lr"] = task.rate * (1 + math.cos(math.pi * step / steps)) / 2
            loss = followed.loss(task.terms(parameters, index), index)
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
            followed.step()
            step += 1
    return {name: value.detach() for name, value in parameters.items()}


def started(task: Task, seeds: Sequence[int]) -> Parameters:
    """The parameters of members with these seeds, (M, …): the same for the same seed."""
    own = {seed: task.start(torch.Generator().manual_seed(seed)) for seed in set(seeds)}
    names = next(iter(own.values()))
    stacked = {name: torch.stack([own[seed][name] for seed in seeds]) for name in names}
    return {name: value.requires_grad_() for name, value in stacked.items()}


class Orders:
    """The order of the samples in each epoch: the same for members of the same seed."""

    def __init__(self, task: Task, seeds: Sequence[int]) -> None:
        self.samples, self.batch = task.samples, task.batch_size
        distinct = sorted(set(seeds))
        self.generators = [
            torch.Generator().manual_seed(1000 + seed) for seed in distinct
        ]
        self.places = torch.tensor([distinct.index(seed) for seed in seeds])

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return math.ceil(self.samples / self.batch)

    def epoch(self) -> list[Tensor]:
        """(M, B) each."""
        drawn = [torch.randperm(self.samples, generator=g) for g in self.generators]
        return list(torch.stack(drawn)[self.places].split(self.batch, dim=1))
