"""The problems of benchmarks/optimum as tasks of the laboratory: their networks, member by member.

Their optima are numbers here, found by cvxpy 1.9.3, which the tests compare with where it is
installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks.optimum.problems import Problem

from .task import Parameters, Task, Terms


class Member:
    """A network with the parameters of one member, as ``terms`` of a problem uses it."""

    def __init__(self, network: nn.Module, parameters: Parameters) -> None:
        self.network, self.parameters = network, parameters

    def __call__(self, x: Tensor) -> Tensor:
        return functional_call(self.network, self.parameters, (x,))

    def get_parameter(self, name: str) -> Tensor:
        return self.parameters[name]


def known(
    make: Callable[[], Problem], optimum: float | None = None, longest: int = 100
) -> Task:
    """A problem of benchmarks/optimum, at its lengths up to the longest."""
    problem = make()
    if problem.slack is None:
        raise ValueError("a problem without a slack has no share violated")
    network = problem.net()

    def start(generator: torch.Generator) -> Parameters:
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            drawn = problem.net()
        return {
            name: value.detach().clone() for name, value in drawn.named_parameters()
        }

    def of_member(parameters: Parameters, index: Tensor) -> Terms:
        return problem.terms(Member(network, parameters), index)  # type: ignore[arg-type]

    rows = problem.samples if problem.judged is None else problem.judged.stop
    membership = problem.membership(torch.arange(rows))
    return Task(
        problem.samples,
        start,
        vmap(of_member),
        problem.constraints(1.0),
        dict(problem.slack),
        membership=membership,
        unseen=range(0) if problem.judged is None else problem.judged,
        optimum=None if optimum is None else lambda: optimum,
        batch=problem.batch,
        rate=problem.training.learning_rate,
        lengths=tuple(length for length in problem.lengths if 1 <= length <= longest),
    )
