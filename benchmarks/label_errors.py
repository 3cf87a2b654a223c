"""Which ranking of the training samples finds label errors: λ, u*, or a mean violation or loss.

    python benchmarks/label_errors.py
    python benchmarks/label_errors.py --cross-encoder MODEL RECORDS

Label errors are planted in real data, so it is known where they are. Digits: 512 of scikit-learn's,
a share of which get another class; the constraint is a log-likelihood of the label of at least
log ½. Re-ranking, with a model and MS MARCO records of ten passages: features of the frozen
cross-encoder; the constraint is a margin of 1 over every negative, a sample ranks by its largest
value, and an error swaps the positive with a negative. Both train a network of one hidden layer,
which in time learns the errors by heart. Objective: the squared norm of the weights, small; of
plain training the cross-entropy, "loss" below.

Printed: average precision, and the precision among the first n, n the number planted; mean ±
standard deviation over the seeds, after each number of epochs (of one run: the learning rate is
constant). A seed sets the samples, the errors, the weights and the order. One thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from pl_pointwise import (
    Constraint,
    Formulation,
    Optimization,
    Pointwise,
    PointwiseDataModule,
    PointwiseModule,
    Relaxed,
    Training,
)

Problem = Callable[[int, float], tuple[Tensor, Tensor, Tensor]]
Results = dict[tuple[str, str], dict[int, list[tuple[float, float]]]]

FORMULATIONS: dict[str, Formulation | None] = {
    "plain training": None,
    "`Pointwise`": Pointwise(alpha=0.3, dual_lr=0.3),
    "`Relaxed`, quadratic": Relaxed(alpha=0.3, beta=1.0, dual_lr=0.3),
    "`Relaxed`, linear": Relaxed(alpha=0.3, beta=1.0, cost="linear", dual_lr=0.3),
}
DIGITS, BATCH, HIDDEN = 512, 128, 128
LEARNING_RATE = 0.01
WEIGHT_NORM = 0.01


class Network(PointwiseModule):
    """Scores of classes, or of candidates; the label's is to be the largest.

    x: (B, D), scored for each class; or (B, C, D), each candidate with one score.
    """

    def __init__(self, formulation: Formulation | None, shape: torch.Size) -> None:
        self.classes = len(shape) == 2
        bound = Constraint(at_least=math.log(0.5) if self.classes else 1.0)
        super().__init__(
            formulation=formulation,
            constraints={"label": bound},
            training=Training(Optimization(learning_rate=LEARNING_RATE)),
        )
        self.network = torch.nn.Sequential(
            torch.nn.Linear(shape[-1], HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN, 10 if self.classes else 1),
        )

    def forward(self, batch: Any) -> Tensor:
        scores: Tensor = self.network(batch["x"])
        return scores if self.classes else scores[..., 0]

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        if not self.formulations:
            return cross_entropy(outputs, batch["y"], reduction="none")
        squares = torch.stack(
            [p.square().sum() for p in self.network.parameters()]
        ).sum()
        return (WEIGHT_NORM * squares).expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        label = batch["y"][:, None]
        if self.classes:
            return {"label": log_softmax(outputs, dim=1).gather(1, label)[:, 0]}
        others = torch.arange(outputs.shape[1]) != label
        margins = outputs.gather(1, label) - outputs
        return {"label": margins[others].view(len(outputs), -1)}


class Data(PointwiseDataModule):
    def __init__(self, x: Tensor, y: Tensor, seed: int) -> None:
        super().__init__(batch_size=BATCH, seed=seed)
        self.x, self.y = x, y
        self.datasets = {"train": [{"row": row} for row in range(len(x))]}

    def collate(self, rows: list[dict[str, Any]]) -> Any:
        index = torch.tensor([row["index"] for row in rows])
        return {"index": index, "x": self.x[index], "y": self.y[index]}


class Rankings(Callback):
    """After some epochs, by name, a value for every sample, (N,): the larger, the more suspect."""

    def __init__(self, epochs: list[int]) -> None:
        self.epochs = epochs
        self.values: dict[int, dict[str, Tensor]] = {}
        self._violation = self._loss = torch.zeros(0)
        # Of each epoch: every sample has one visit in it.
        self._violations: list[Tensor] = []
        self._losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        assert isinstance(pl_module, PointwiseModule)
        measured = pl_module.measured
        assert measured is not None
        if not len(self._loss):
            self._loss = torch.zeros(pl_module.multipliers.samples)
            self._violation = torch.full((len(self._loss), 1), torch.nan)
        self._loss[measured.index] = measured.objective.float()
        self._violation[measured.index] = measured.judged["label"].float()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PointwiseModule)
        self._violations.append(self._violation.clone())
        self._losses.append(self._loss[:, None].clone())
        epoch = trainer.current_epoch + 1
        if epoch not in self.epochs:
            return
        formulation = pl_module.formulations.get("label")
        found = {} if formulation else _over_visits("loss", self._losses)
        found |= _over_visits("violation", self._violations)
        if formulation:
            multipliers = pl_module.multipliers["label"]
            found["λ"] = multipliers.clone()
            if isinstance(formulation, Relaxed):
                found["u*"] = formulation.relaxation(self._violations[-1], multipliers)
        self.values[epoch] = {name: value.amax(1) for name, value in found.items()}


def _over_visits(name: str, visits: list[Tensor]) -> dict[str, Tensor]:
    all_of_them = torch.stack(visits)
    return {
        f"last {name}": all_of_them[-1],
        f"mean {name}": all_of_them.mean(0),
        f"mean {name}, second visit on": all_of_them[1:].mean(0),
    }


def digits(seed: int, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, 64), the labels (N,) with errors, and where these are, bool (N,)."""
    generator = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    chosen = generator.permutation(len(y))[:DIGITS]
    wrong = np.zeros(DIGITS, dtype=bool)
    wrong[generator.permutation(DIGITS)[: round(rate * DIGITS)]] = True
    labels = np.where(
        wrong, (y[chosen] + generator.integers(1, 10, DIGITS)) % 10, y[chosen]
    )
    return (
        torch.tensor(x[chosen] / 16).float(),
        torch.tensor(labels),
        torch.tensor(wrong),
    )


def swapped(
    features: Tensor, positives: Tensor, seed: int, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for candidates: x (N, C, D), the positive's position with errors, and where."""
    generator = torch.Generator().manual_seed(seed)
    count, candidates, _ = features.shape
    wrong = torch.zeros(count, dtype=torch.bool)
    wrong[torch.randperm(count, generator=generator)[: round(rate * count)]] = True
    shift = torch.randint(1, candidates, (count,), generator=generator)
    return (
        features,
        torch.where(wrong, (positives + shift) % candidates, positives),
        wrong,
    )


@torch.no_grad()
def frozen_features(model: str, records: Path) -> tuple[Tensor, Tensor]:
    """What the classifier of the cross-encoder reads, (N, C, D), standardised; positives (N,)."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModelForSequenceClassification.from_pretrained(
        model, use_safetensors=True
    ).eval()
    read: list[Tensor] = []
    encoder.classifier.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    rows = [
        json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()
    ]
    pairs = [
        [
            f"Query: {row['query']}\nSentence: {text}"
            for text in row["passages"]["passage_text"]
        ]
        for row in rows
    ]
    texts = sorted({text for row in pairs for text in row}, key=len)
    for start in range(0, len(texts), 16):
        batch = texts[start : start + 16]
        encoder(**tokenizer(batch, padding=True, truncation=True, return_tensors="pt"))
    by_text = dict(zip(texts, torch.cat(read), strict=True))
    features = torch.stack(
        [torch.stack([by_text[text] for text in row]) for row in pairs]
    )
    positives = torch.tensor([row["passages"]["is_selected"].index(1) for row in rows])
    return (features - features.mean((0, 1))) / features.std((0, 1)), positives


def rankings_of(
    problem: Problem, rate: float, seeds: int, epochs: list[int]
) -> Results:
    """By formulation and ranking, and by epochs: both precisions of every seed."""
    results: Results = defaultdict(lambda: defaultdict(list))
    for seed in range(seeds):
        x, y, wrong = problem(seed, rate)
        drawn = torch.rand(len(x), generator=torch.Generator().manual_seed(seed))
        for name, formulation in FORMULATIONS.items():
            torch.manual_seed(seed)
            rankings = Rankings(epochs)
            trainer = Trainer(
                accelerator="cpu",
                max_epochs=max(epochs),
                logger=False,
                callbacks=[rankings],
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(Network(formulation, x.shape), Data(x, y, seed))
            for epoch, values in rankings.values.items():
                for ranking, value in values.items():
                    results[name, ranking][epoch].append(precisions(wrong, value))
        for epoch in epochs:
            results["–", "random order"][epoch].append(precisions(wrong, drawn))
    return results


def precisions(wrong: Tensor, value: Tensor) -> tuple[float, float]:
    """Average precision; and among the first n, n the number of errors."""
    first = value.argsort(descending=True, stable=True)[: int(wrong.sum())]
    return float(average_precision_score(wrong, value)), float(
        wrong[first].float().mean()
    )


def print_table(results: Results, epochs: list[int]) -> None:
    heads = [f"{kind}, {epoch}" for kind in ("AP", "P@n") for epoch in epochs]
    print(
        f"| trained by | ranked by | {' | '.join(heads)} |\n|---|---|{'---|' * len(heads)}"
    )
    for (formulation, ranking), found in results.items():
        values = np.array([found[epoch] for epoch in epochs])  # (epochs, seeds, 2)
        means, deviations = values.mean(1).T.flatten(), values.std(1).T.flatten()
        cells = [f"{m:.3f} ± {d:.2f}" for m, d in zip(means, deviations, strict=True)]
        print(f"| {formulation} | {ranking} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cross-encoder", nargs=2, metavar=("MODEL", "RECORDS"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1])
    parser.add_argument(
        "--epochs", type=int, nargs="+", default=[5, 20, 60], help="2 at least"
    )
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    problems: dict[str, Problem] = {"digits": digits}
    if arguments.cross_encoder:
        model, records = arguments.cross_encoder
        problems["re-ranking"] = partial(
            swapped, *frozen_features(model, Path(records))
        )
    for rate in arguments.rates:
        for name, problem in problems.items():
            print(f"\n{name}, {100 * rate:g} % errors\n", flush=True)
            print_table(
                rankings_of(problem, rate, arguments.seeds, arguments.epochs),
                arguments.epochs,
            )


if __name__ == "__main__":
    main()
