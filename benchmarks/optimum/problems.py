"""The problems: each a mean objective under constraints on every sample, some with their optimum.

Unless said otherwise: ten steps an epoch, Adam, a rate that falls to 0 linearly.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, make_classification
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from pl_pointwise import Constraint, Optimization

STEPS = 10
_entropy = partial(cross_entropy, reduction="none")
Terms = tuple[Tensor, dict[str, Tensor]]
"""ℓ₀, (B,), and of each constraint ℓ_k, (B,) or (B, K)."""
Program = tuple[Any, list[Any]]  # An objective and constraints of cvxpy.


@dataclass
class Problem:
    """Minimise mean ℓ₀ under ℓ_k ≤ ``bounds``, or = for the names in ``equal``, on ``samples``.

    Args:
        terms: ℓ₀ and the ℓ_k of the samples at the given positions.
        slack: by how much a value has to miss its bound for its sample to count as violated; None:
            the worst value of a sample is taken instead, of the constraints that are no equality.
        judged: the positions that are judged, where they are not those that train.
        error: of the network, instead of the mean of ℓ₀.
        optimum: with cvxpy the objective at its optimum and the constraints.
        momentum: trains by SGD with it instead, at a constant rate of .1.
        lengths: the epochs that are run.
    """

    samples: int
    net: Callable[[], nn.Module]
    terms: Callable[[nn.Module, Tensor], Terms]
    bounds: dict[str, float]
    slack: dict[str, float] | None = field(default_factory=lambda: {"c": 0.02})
    equal: tuple[str, ...] = ()
    membership: Callable[[Tensor], dict[str, Tensor]] = lambda index: {}
    judged: range | None = None
    error: Callable[[nn.Module], Tensor] | None = None
    optimum: Callable[[Any], Program] | None = None
    training: Optimization = field(
        default_factory=lambda: Optimization(0.03, 0.0, "linear")
    )
    momentum: float | None = None
    batch: int | None = None
    lengths: tuple[int, ...] = (1, 3, 10, 30, 100)

    def constraints(self, unit: float) -> dict[str, Constraint]:
        kinds = {
            name: "equals" if name in self.equal else "at_most" for name in self.bounds
        }
        return {
            name: Constraint(**{kinds[name]: b * unit})
            for name, b in self.bounds.items()
        }

    @cached_property
    def least(self) -> float | None:
        """The objective of the constrained optimum, where it is known."""
        if self.optimum is None:
            return None
        cp = import_module("cvxpy")
        objective, met = self.optimum(cp)
        return float(cp.Problem(cp.Minimize(objective), met).solve(solver="CLARABEL"))

    @torch.no_grad()
    def measure(self, net: nn.Module) -> dict[str, float]:
        """The share violated, the objective, and of equalities the mean of |ℓ − c|."""
        index = torch.tensor(self.judged or range(self.samples))
        objective, values = self.terms(net, index)
        members = self.membership(index)
        found, missed, equality = {}, [], []
        for name, value in values.items():
            excess = (value - self.bounds[name])[members.get(name, slice(None))]
            excess = excess.abs() if name in self.equal else excess.clamp(min=0)
            worst = excess.flatten(1).amax(1) if excess.ndim > 1 else excess
            equality += [excess.flatten()] if name in self.equal else []
            if self.slack is not None:
                # NaN is violated.
                missed.append((~(worst <= self.slack[name])).float())
            elif name not in self.equal:
                missed.append(worst)
        found["violated"] = torch.cat(missed)
        found["objective"] = self.error(net) if self.error else objective
        found |= {"equality": torch.cat(equality)} if equality else {}
        return {name: float(each.mean()) for name, each in found.items()}


def _linear(inputs: int, outputs: int) -> nn.Module:
    net = nn.Linear(inputs, outputs)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


ONE, TEN = partial(_linear, 64, 1), partial(_linear, 64, 10)


def _digits(seed: int, count: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """Digits, the same transposed, and their labels."""
    digits = load_digits()
    chosen = np.random.default_rng(seed).permutation(len(digits.data))[:count]
    upright = torch.tensor(digits.data[chosen] / 16, dtype=torch.float32)
    turned = upright.view(-1, 8, 8).transpose(1, 2).reshape(-1, 64)
    return upright, turned, torch.tensor(digits.target[chosen])


def _logits(cp: Any, x: Tensor, y: Tensor) -> tuple[Any, Any, Any]:
    """cvxpy's weights of a linear model, its logits of ``x``, and those of the labels."""
    w, b = cp.Variable((x.shape[1], 10)), cp.Variable((1, 10))
    z = x.numpy() @ w + np.ones((len(x), 1)) @ b
    return w, z, cp.sum(cp.multiply(np.eye(10)[y.numpy()], z), axis=1)


def _size(net: nn.Module, index: Tensor) -> Tensor:
    return net.get_parameter("weight").square().sum().expand(len(index))


def margins(contradicting: int = 0) -> Problem:
    """The smallest weights that tell two digits apart with a margin of 1."""
    digits = load_digits()
    keep = np.isin(digits.target, [3, 8])
    x = torch.tensor(digits.data[keep][:300] / 16, dtype=torch.float32)
    y = torch.tensor(
        np.where(digits.target[keep][:300] == 3, 1.0, -1.0), dtype=torch.float32
    )
    x, y = torch.cat([x, x[:contradicting]]), torch.cat([y, -y[:contradicting]])

    def optimum(cp: Any) -> Program:
        w, b = cp.Variable(64), cp.Variable()
        return cp.sum_squares(w), [cp.multiply(y.numpy(), x.numpy() @ w + b) >= 1]

    def terms(net: nn.Module, i: Tensor) -> Terms:
        return _size(net, i), {"c": -net(x[i])[:, 0] * y[i]}

    known = None if contradicting else optimum
    return Problem(len(x), ONE, terms, {"c": -1.0}, optimum=known)


def retention() -> Problem:
    """Learn turned digits; the cross-entropy of each upright one stays below .7."""
    upright, turned, y = _digits(0)
    regular = 1e-3

    def optimum(cp: Any) -> Program:
        w, z, right = _logits(cp, torch.cat([turned, upright]), torch.cat([y, y]))
        entropy = cp.log_sum_exp(z, axis=1) - right
        cost = cp.sum(entropy[: len(y)]) / len(y) + regular * cp.sum_squares(w)
        return cost, [entropy[len(y) :] <= 0.7]

    def terms(net: nn.Module, i: Tensor) -> Terms:
        objective = _entropy(net(turned[i]), y[i]) + regular * _size(net, i)
        return objective, {"c": _entropy(net(upright[i]), y[i])}

    return Problem(len(y), TEN, terms, {"c": 0.7}, optimum=optimum)


def unlike_units() -> Problem:
    """Three constraints in units of 1, .01 and 100, one of them nearly met at the start."""
    x, _, y = _digits(1)

    def optimum(cp: Any) -> Program:
        w, z, right = _logits(cp, x, y)
        entropy, largest = cp.log_sum_exp(z, axis=1) - right, cp.max(cp.abs(z), axis=1)
        return cp.sum_squares(w), [entropy <= 1.3, largest <= 5, right >= 0]

    def terms(net: nn.Module, i: Tensor) -> Terms:
        z = net(x[i])
        right = z.gather(1, y[i][:, None])[:, 0]
        cap, margin = 1e-2 * z.abs().amax(1), -1e2 * right
        return _size(net, i), {"nats": _entropy(z, y[i]), "cap": cap, "margin": margin}

    bounds = {"nats": 1.3, "cap": 0.05, "margin": 0.0}
    slack = {"nats": 0.02, "cap": 2e-4, "margin": 2.0}
    return Problem(len(y), TEN, terms, bounds, slack, optimum=optimum)


def capped() -> Problem:
    """Learn digits with no logit beyond 2, which the start meets."""
    x, _, y = _digits(7)

    def optimum(cp: Any) -> Program:
        _, z, right = _logits(cp, x, y)
        return cp.sum(cp.log_sum_exp(z, axis=1) - right) / len(y), [cp.abs(z) <= 2]

    def terms(net: nn.Module, i: Tensor) -> Terms:
        z = net(x[i])
        return _entropy(z, y[i]), {"c": z.abs().amax(1)}

    return Problem(len(y), TEN, terms, {"c": 2.0}, optimum=optimum)


def equalities() -> Problem:
    """The smallest weights whose output is a given number for each of 40 samples."""
    x = _digits(4, 40)[0]
    y = torch.randn(40, generator=torch.Generator().manual_seed(0))

    def optimum(cp: Any) -> Program:
        w, b = cp.Variable(64), cp.Variable()
        return cp.sum_squares(w), [x.numpy() @ w + b == y.numpy()]

    def terms(net: nn.Module, i: Tensor) -> Terms:
        return _size(net, i), {"c": net(x[i])[:, 0] - y[i]}

    found = {"equal": ("c",), "optimum": optimum}
    return Problem(40, ONE, terms, {"c": 0.0}, **found)


def layers(*widths: int, between: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    found: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        found += [nn.Linear(inputs, outputs), between()]
    return nn.Sequential(*found[:-1])


def retaught(learn: bool) -> Problem:
    """A network learns turned digits within a KL of .05 on each upright one; or, the language
    tasks' shape, with as little of it as possible to a cross-entropy of .5: 0 at the start.
    """
    upright, turned, y = _digits(2)
    torch.manual_seed(0)
    start = layers(64, 64, 10)
    optimizer = torch.optim.Adam(start.parameters(), 0.01)
    for _ in range(200):
        cross_entropy(start(upright), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = start(upright).log_softmax(-1).detach()

    def terms(net: nn.Module, i: Tensor) -> Terms:
        found = net(upright[i]).log_softmax(-1)
        kept = kl_div(found, reference[i], reduction="none", log_target=True).sum(-1)
        learned = _entropy(net(turned[i]), y[i])
        return (learned, {"c": kept}) if learn else (kept, {"c": learned})

    bound, slack = (0.05, 0.001) if learn else (0.5, 0.02)
    return Problem(len(y), partial(deepcopy, start), terms, {"c": bound}, {"c": slack})


def band(samples: int, lengths: tuple[int, ...]) -> Problem:
    """A forecast that must lie in each sample's own band, which the truth does: new inputs."""
    generator, parts = torch.Generator().manual_seed(0), []
    for count in (samples, 300, 600):
        x = torch.rand(count, 6, generator=generator) * 2 - 1
        truth = 2 * x[:, 0] + torch.sin(3 * x[:, 1]) * x[:, 2] + x[:, 3] ** 2
        width = 0.15 + 0.5 * torch.rand(count, generator=generator)
        noise = 0.6 * torch.randn(count, generator=generator)
        outliers = 2.0 * (torch.rand(count, generator=generator) < 0.2)
        parts.append((x, truth + noise + outliers, truth - width, truth + width))
    x, y, low, high = map(torch.cat, zip(parts[0], parts[2], strict=True))

    def terms(net: nn.Module, i: Tensor) -> Terms:
        found = net(x[i])[:, 0]
        sides = torch.stack([found - high[i], low[i] - found], 1)
        return (found - y[i]).square(), {"c": sides}

    net, new = partial(layers, 6, 32, 32, 1), range(samples, len(y))
    how = {
        "training": Optimization(3e-3, 0.0, "linear"),
        "batch": 32,
        "lengths": lengths,
    }
    return Problem(samples, net, terms, {"c": 0.0}, {"c": 0.0}, judged=new, **how)


def kept_answers(
    samples: int, momentum: float | None, lengths: tuple[int, ...]
) -> Problem:
    """A network learns a table; what a linear model got right it gets right by .5."""
    found = make_classification(3000, 20, n_informative=8, flip_y=0.05, random_state=0)
    x, y = torch.tensor(found[0], dtype=torch.float32), torch.tensor(found[1])
    before = LogisticRegression(max_iter=1000).fit(found[0][1200:], found[1][1200:])
    right = torch.tensor(before.predict(found[0]) == found[1])

    def terms(net: nn.Module, i: Tensor) -> Terms:
        z = net(x[i])
        lead = (z[:, 1] - z[:, 0]) * (2 * y[i] - 1)
        return _entropy(z, y[i]), {"c": -lead}

    net = partial(layers, 20, 64, 64, 2, between=nn.ReLU)
    how = {
        "membership": lambda i: {"c": right[i]},
        "lengths": lengths,
        "momentum": momentum,
    }
    how |= {"training": Optimization(3e-3, 0.0, "cosine"), "batch": min(samples, 64)}
    return Problem(samples, net, terms, {"c": -0.5}, **how)


def programs(in_loss: bool) -> Problem:
    """x ↦ y with min ½yᵀQy + pᵀy, Ay = x, Gy ≤ h; judged on 833 new x. The programs are those of
    DC3 (Donti, Rolnick and Kolter 2021), by its formula and seed.

    Ay = x holds by completion, or is a constraint in the loss. What is violated is the worst
    inequality of an instance.
    """
    draw, unknown, bound = np.random.RandomState(17), 100, 50
    q, p = draw.random_sample(unknown), draw.random_sample(unknown)
    a, x = draw.normal(0, 1, (bound, unknown)), draw.uniform(-1, 1, (10000, bound))
    g, inverse = draw.normal(0, 1, (bound, unknown)), np.linalg.pinv(a)
    null = np.linalg.svd(a)[2][bound:]
    h = np.abs(g @ inverse).sum(1)
    of = {
        "q": q,
        "p": p,
        "a": a,
        "x": x,
        "g": g,
        "h": h,
        "inverse": inverse,
        "null": null,
    }
    q, p, a, x, g, h, inverse, null = (
        torch.tensor(np.ascontiguousarray(each), dtype=torch.float32)
        for each in of.values()
    )
    new = range(10000 - 833, 10000)

    def terms(net: nn.Module, i: Tensor) -> Terms:
        y = net(x[i]) if in_loss else x[i] @ inverse.T + net(x[i]) @ null
        values = {"inequality": y @ g.T - h} | (
            {"equality": y @ a.T - x[i]} if in_loss else {}
        )
        return 0.5 * y.square() @ q + y @ p, values

    def optimum(cp: Any) -> Program:
        y = (
            of["x"][new.start :] @ of["inverse"].T
            + cp.Variable((len(new), 50)) @ of["null"]
        )
        cost = 0.5 * cp.sum_squares(y @ np.diag(np.sqrt(of["q"]))) + cp.sum(y @ of["p"])
        return cost / len(new), [y @ of["g"].T <= np.tile(of["h"], (len(new), 1))]

    net = partial(layers, 50, 200, 200, 100 if in_loss else 50, between=nn.ReLU)
    bounds = {"inequality": 0.0} | ({"equality": 0.0} if in_loss else {})
    how = {"equal": ("equality",), "judged": new, "optimum": optimum, "batch": 200}
    how |= {"training": Optimization(1e-3, 0.0, "linear"), "lengths": (10, 30, 150)}
    return Problem(10000 - 2 * 833, net, terms, bounds, None, **how)
