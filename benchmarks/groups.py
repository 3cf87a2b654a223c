"""A bound on the mean of each group: stocks of 60 articles, each with a service level of 0.9.

    python -m benchmarks.groups            (a minute or two)

A sample is a day of an article, a group the 30 days of an article. What a stock serves of the
demand, over the article's mean demand, has to be 0.9 in the mean over its days, at the least cost
of all stocks. An article's least stock is known exactly. New days are 30 others of the same
articles, over their own mean demand.

Writes a row of each setting and seed: ``above`` is the cost over the least cost of 0.9, minus 1;
``short`` the share of articles that serve less than 0.9 by more than 10⁻⁶, ``by`` how much less in
the mean over all articles. ``bound`` is that of training. ``on``: the mean of each article; the
same of values in pieces, of which an article sells 1 to 1,000 a day; or each day by itself.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.loops import Row, minimise, write
from pl_pointwise import Constraint, Pointwise, PointwiseLoss

OUTPUT = Path(__file__).parent / "evidence/results/groups.csv"
LEVEL, ARTICLES, DAYS, STEPS_AN_EPOCH, RATE = 0.9, 60, 30, 10, 0.05
SHORT = 1e-6
"""By how much a mean is below the level at least, to be called short."""


@dataclass(frozen=True)
class Setting:
    """How the stocks are trained.

    Args:
        on: "mean", "mean, in pieces" or "each day".
    """

    epochs: int
    bound: float = LEVEL
    on: str = "mean"


SETTINGS = (
    Setting(10),
    Setting(30),
    Setting(100),
    Setting(100, bound=0.92),
    Setting(100, bound=0.94),
    Setting(100, on="each day"),
    Setting(100, on="mean, in pieces"),
)


class Shop:
    """Demand of each article on each day, (A, D), exponential, and what a piece in stock costs."""

    def __init__(self, articles: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.mean = 0.5 + _uniform(articles, 1, generator)
        self.demand = self.days(generator)
        self.cost = 0.5 + _uniform(articles, 1, generator)[:, 0]
        self.new_demand = self.days(generator)
        # What an article's day sells in pieces; a piece costs the less, so all articles count.
        self.pieces = 1000 ** _uniform(articles, 1, generator)[:, 0]

    def days(self, generator: torch.Generator) -> Tensor:
        uniform = _uniform(len(self.mean), DAYS, generator)
        return -self.mean * uniform.clamp(min=1e-9).log()

    def total(self, stock: Tensor) -> Tensor:
        """The mean cost of stocks (A,)."""
        return (self.cost * stock).mean()

    def least(self) -> Tensor:
        """(A,), the least stocks that serve the level.

        The mean that a stock serves is linear between two demands, and concave.
        """
        found = []
        for demand in self.demand.numpy():
            stocks = np.append(0.0, np.sort(demand))
            serves = np.minimum(stocks[:, None], demand).mean(1)
            found.append(np.interp(LEVEL * demand.mean(), serves, stocks))
        return torch.tensor(found)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.rand(rows, columns, generator=generator, dtype=torch.float64)


def served(stock: Tensor, demand: Tensor) -> Tensor:
    """(A, D), what stocks (A,) serve of a day's demand, over the article's mean demand."""
    return torch.minimum(stock[:, None], demand) / demand.mean(1, keepdim=True)


def train(shop: Shop, setting: Setting, seed: int) -> Tensor:
    """The stocks (A,), by Adam and a rate that falls to 0."""
    articles, days = shop.demand.shape
    article = torch.arange(articles).repeat_interleave(days)
    weight = torch.zeros(articles, dtype=torch.float64, requires_grad=True)
    steps = setting.epochs * STEPS_AN_EPOCH
    unit = shop.pieces if "pieces" in setting.on else torch.ones(articles)
    each_sample = setting.on == "each day"
    constrained = PointwiseLoss(
        {"served": Constraint(at_least=0.0, each_sample=each_sample)},
        Pointwise(),
        samples=len(article),
        groups=article,
        total_steps=steps,
    )
    generator = torch.Generator().manual_seed(100 + seed)

    def terms(index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        stock = softplus(3 * weight)
        value = served(stock, shop.demand).flatten()[index] - setting.bound
        cost = shop.total(stock).expand(len(index))
        return cost, {"served": value * unit[article[index]]}

    orders = [
        torch.randperm(len(article), generator=generator) for _ in range(setting.epochs)
    ]
    batches = [index for order in orders for index in order.chunk(STEPS_AN_EPOCH)]
    minimise(constrained, terms, [weight], batches, RATE)
    return softplus(3 * weight.detach())


def shortage(stock: Tensor, demand: Tensor) -> tuple[float, float]:
    """The share of articles that are short, and by how much the mean article is."""
    missing = (LEVEL - served(stock, demand).mean(1)).clamp(min=0)
    return float((missing > SHORT).double().mean()), float(missing.mean())


def run(setting: Setting, seed: int, articles: int = ARTICLES) -> Row:
    shop = Shop(articles, seed)
    stock = train(shop, setting, seed)
    short, by = shortage(stock, shop.demand)
    new_short, new_by = shortage(stock, shop.new_demand)
    return {
        "epochs": setting.epochs,
        "bound": setting.bound,
        "on": setting.on,
        "seed": seed,
        "above": float(shop.total(stock) / shop.total(shop.least())) - 1,
        "short": short,
        "by": by,
        "new short": new_short,
        "new by": new_by,
    }


def main(arguments: list[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--articles", type=int, default=ARTICLES)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    planned = product(SETTINGS, given.seeds)
    write(
        (run(setting, seed, given.articles) for setting, seed in planned), given.output
    )


if __name__ == "__main__":
    main()
