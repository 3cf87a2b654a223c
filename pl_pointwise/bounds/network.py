"""A network λ(x), and its training by the bound alone."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from .problems import ConvexProblems

FLOOR = 0.02
"""What λ(x) starts at where the price is 0, as a share of the largest price: ReLU has no slope
at 0."""


class DualNetwork(nn.Module):
    """λ(x) ≥ 0, (B, E) ↦ (B, K): a network whose last layer starts at one λ for all x.

    Args:
        inputs: E.
        start: (K,) ≥ 0, such as the mean price of a run.
        width: of its two layers.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.bounds import DualNetwork
    >>> network = DualNetwork(1, start=torch.tensor([0.5, 0.0]))
    >>> network(torch.tensor([[3.0]])).detach()  # A price of 0 starts a little above.
    tensor([[0.5000, 0.0100]])
    """

    def __init__(self, inputs: int, start: Tensor, width: int = 200) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))
        sizes, layers = (inputs, width, width), list[nn.Module]()
        for pair in pairwise(sizes):
            layers += [nn.Linear(*pair), nn.ReLU()]
        self.last = nn.Linear(width, len(start))
        self.network = nn.Sequential(*layers, self.last)
        self.start_at(start)

    @torch.no_grad()
    def start_at(self, start: Tensor) -> None:
        """From now on, until it is trained, λ(x) is ``start``, (K,), whatever x is."""
        start = start.detach().to(self.scale).clamp(min=0)
        # Where all prices are 0 there is no unit, and any will do.
        self.scale.fill_(float(start.max()) or 1.0)
        nn.init.zeros_(self.last.weight)
        self.last.bias.copy_((start / self.scale).clamp(min=FLOOR))

    def forward(self, x: Tensor) -> Tensor:
        shape: Tensor = self.network(x.to(self.scale.dtype))
        return self.scale * shape.relu()


def train_bound(
    network: DualNetwork,
    program: ConvexProblems,
    x: Tensor,
    *,
    epochs: int = 20,
    batch: int = 200,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> DualNetwork:
    """Trains λ(x) by D, which needs neither labels nor a solver.

    Args:
        network: started at a good λ.
        program: the problems.
        x: (N, E), those to train on.
        epochs: over x.
        batch: instances a step.
        learning_rate: of Adam, which falls to 0 linearly.
        seed: of the order.

    Returns:
        The network.

    .. versionadded:: 0.3.0

    >>> from pl_pointwise.bounds import DualNetwork, QuadraticProgram, train_bound
    >>> G, h = torch.tensor([[1.0, 0.0]]), torch.tensor([0.25])  # y₁ ≤ 0.25, y₁ + y₂ = x.
    >>> program = QuadraticProgram(torch.ones(2), torch.zeros(2), torch.ones(1, 2), G, h)
    >>> x = torch.linspace(1, 2, 50)[:, None]
    >>> network = DualNetwork(1, start=torch.tensor([0.2]))
    >>> before = program.dual(x, network(x)).mean()
    >>> network = train_bound(network, program, x, epochs=50)
    >>> bool(program.dual(x, network(x)).mean() > before)
    True
    """
    program.require_convex(x)
    trained = [weight.requires_grad for weight in network.parameters()]
    optimizer = torch.optim.Adam(
        network.requires_grad_(True).parameters(), learning_rate
    )
    total = epochs * -(-len(x) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / total
    )
    draw = torch.Generator().manual_seed(seed)
    network.train()
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=draw).split(batch):
                of = x[rows].clone()
                loss = -program.dual(of, network(of)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    for weight, before in zip(network.parameters(), trained, strict=True):
        weight.grad = None
        weight.requires_grad_(before)
    return network.eval()
