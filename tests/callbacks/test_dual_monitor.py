"""The monitor's figures are those of the steps taken, and reach any logger."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger

from pl_pointwise import Average, Penalty, Pointwise, Relaxed
from pl_pointwise.callbacks import DualMonitor
from tests.callbacks.witness import Reported, Visit, Witness
from tests.pl_pointwise.toy import (
    CONSTRAINTS,
    INTERVALS,
    At,
    Toy,
    ToyData,
    ToyRows,
    fit,
    trainer,
)

BOUNDS = {"fit": (-0.3, None), "pair": (None, 0.2)}
WIDE = {"fit": (0.3, -0.2), "pair": (0.4, 0.4)}
ROWS = ToyRows(23, seed=2, partial=True)


def relaxation(formulation: Any, v: Any, m: Any) -> Any:
    """u*, the minimiser over u ≥ 0 of c(u) + ψ_pointwise(v − u, λ)."""
    alpha, beta, slope = (
        formulation.alpha,
        formulation.beta,
        m + 2 * formulation.alpha * v,
    )
    if formulation.cost == "linear":
        return np.maximum(slope - beta, 0.0) / (2 * alpha)
    return np.maximum(slope, 0.0) / (2 * (alpha + beta))


def side_means(visit: Visit, name: str) -> list[float]:
    """The batch mean of each side of a constraint that some sample carries."""
    v, mask = visit.violation[name], visit.mask[name]
    sides = 1 if visit.after[name].ndim == 0 else 2
    halves = np.split(v, sides, 1), np.split(mask, sides, 1)
    kept = halves[1][0].any(1)
    return [
        float(np.mean([r[m].mean() for r, m in zip(a[kept], b[kept], strict=True)]))
        for a, b in zip(*halves, strict=True)
    ]


def expected(
    visits: list[Visit], all_visits: list[Visit], name: str, formulation: Any
) -> dict[str, float]:
    figures = {}
    if isinstance(formulation, Average):
        stepped = [visit for visit in visits if visit.mask[name].any()]
        residual = np.mean([side_means(visit, name) for visit in stepped], axis=0)
        moved = np.array([v.after[name] - v.before[name] for v in stepped])
        shown = after = visits[-1].after[name].reshape(-1)
    else:
        entries = [
            (
                v.violation[name][m],
                v.before[name][v.index][m],
                v.after[name][v.index][m],
            )
            for v in visits
            for m in [v.mask[name]]
        ]
        residual, before, after = map(np.concatenate, zip(*entries, strict=True))
        moved = after - before
        if isinstance(formulation, Relaxed):
            relaxed = relaxation(formulation, residual, after)
            residual, figures["relaxed"] = residual - relaxed, np.mean(relaxed > 0)
        seen = np.zeros(visits[-1].after[name].shape, bool)
        for visit in all_visits:
            seen[visit.index] |= visit.mask[name]
        shown = visits[-1].after[name][seen]
    figures["step"] = np.abs(moved).mean()
    figures["slackness"] = np.abs(after * residual).mean()
    figures["infeasibility_mean"] = np.maximum(residual, 0).mean()
    figures["active"] = np.mean(shown > 0)
    figures |= {f"multiplier_q{q}": np.percentile(shown, q) for q in (50, 90, 99)}
    figures["multiplier_max"] = shown.max()
    return {f"dual/{name}/{key}": float(value) for key, value in figures.items()}


@pytest.mark.parametrize(
    ("formulation", "wide"),
    [
        (Pointwise(alpha=0.8, dual_lr=1.2), False),
        (Pointwise(alpha=0.8, dual_lr=1.2), True),
        (Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9), False),
        (Relaxed(alpha=0.8, beta=0.6, cost="linear", dual_lr=0.9), False),
        (Average(alpha=0.8, dual_lr=1.1), False),
        (Average(dual_lr=0.5), True),
    ],
    ids=[
        "pointwise",
        "interval",
        "relaxed",
        "linear cost",
        "average",
        "average of an interval",
    ],
)
def test_figures_are_those_of_the_steps(formulation: Any, wide: bool) -> None:
    witness, reported = Witness(WIDE if wide else BOUNDS), Reported()
    module = Toy(formulation, INTERVALS if wide else CONSTRAINTS, partial=True)
    fit(module, ROWS, callbacks=[DualMonitor(), witness, reported])
    assert len(reported.epochs) == 3
    for epoch, found in enumerate(reported.epochs):
        until = [visit for visit in witness.visits if visit.epoch <= epoch]
        wanted = {}
        for name in BOUNDS:
            wanted |= expected(witness.of_epoch(epoch), until, name, formulation)
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    last = reported.epochs[-1]
    assert 0 < last["dual/pair/active"] <= 1
    if isinstance(formulation, Relaxed):
        assert 0 < last["dual/pair/relaxed"] < 1


def test_only_constraints_with_multipliers_are_reported() -> None:
    reported = Reported()
    each = {"fit": Penalty(weight=1.0), "pair": Pointwise()}
    fit(Toy(each), ROWS, callbacks=[DualMonitor(), reported])
    assert {key.split("/")[1] for key in reported.epochs[0]} == {"pair"}
    reported = Reported()
    fit(Toy(None), ROWS, callbacks=[DualMonitor(), reported])
    assert reported.epochs == [{}, {}, {}]


@pytest.mark.parametrize(
    "formulation", [Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9), Average()]
)
def test_figures_by_steps_are_those_of_the_steps_since_the_last(
    formulation: Any, tmp_path: Path
) -> None:
    """18 steps by 4, over the ends of epochs of 6; the last two are told at the end."""
    witness, logger = Witness(BOUNDS), CSVLogger(tmp_path)
    module = Toy(formulation, partial=True)
    watch = [DualMonitor(every_n_steps=4), witness]
    fit(module, ROWS, callbacks=watch, logger=logger, log_every_n_steps=50)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["dual/fit/step"]]
    assert [int(line["step"]) for line in lines] == [4, 8, 12, 16, 18]
    for line, (start, end) in zip(lines, pairwise([0, 4, 8, 12, 16, 18]), strict=True):
        wanted = {}
        for name in BOUNDS:
            of_window = witness.visits[start:end]
            wanted |= expected(of_window, witness.visits[:end], name, formulation)
        found = {key: float(value) for key, value in line.items() if key in wanted}
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_steps_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0"):
        DualMonitor(every_n_steps=0)


@pytest.mark.parametrize("batches", [6, 8])
def test_figures_after_a_resume_are_those_of_an_uninterrupted_run(
    tmp_path: Path, batches: int
) -> None:
    """After the last of the first epoch's six batches, whose end is to come, or within one."""

    def run(
        path: Path | None = None, save: Path | None = None
    ) -> list[dict[str, float]]:
        reported = Reported()
        savers = (
            [At(batches, lambda trainer: trainer.save_checkpoint(save))] if save else []
        )
        runner = trainer(max_epochs=3, callbacks=[DualMonitor(), reported, *savers])
        module = Toy(Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9), partial=True)
        runner.fit(module, ToyData(ROWS, batch_size=4), ckpt_path=path)
        return reported.epochs

    checkpoint = tmp_path / "mid.ckpt"
    uninterrupted = run(save=checkpoint)
    assert run(checkpoint) == uninterrupted[batches > 6 :]


def test_a_second_fit_is_reported_as_if_it_were_the_first() -> None:
    """The quantiles were taken over samples that only the first fit had visited, too."""

    def found(monitor: DualMonitor) -> list[dict[str, float]]:
        reported = Reported()
        few = {"limit_train_batches": 2, "epochs": 1, "callbacks": [monitor, reported]}
        fit(Toy(Pointwise(), partial=True), ROWS, **few)
        return reported.epochs

    used = DualMonitor()
    fit(Toy(Pointwise(), partial=True), ROWS, callbacks=[used])
    assert found(used) == found(DualMonitor())
