"""Every epoch's table holds each violation once, and its picture shows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from pl_pointwise import Average, Pointwise
from pl_pointwise.callbacks import HardestSamples, ViolationCurves
from tests.callbacks.witness import Witness
from tests.pl_pointwise.toy import (
    INTERVALS,
    PAIRS,
    At,
    Toy,
    ToyData,
    ToyRows,
    fit,
    trainer,
)

BOUNDS = {"fit": (-0.3, None), "pair": (None, 0.2)}
ROWS = ToyRows(23, seed=2, partial=True)
HELD_OUT = ToyRows(9, seed=5, partial=True)

KEY = ["stage", "constraint", "index", "column"]


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the pictures out, which take longer than all else."""
    monkeypatch.setattr("pl_pointwise.callbacks.violation_curves.cdfs_by_epoch", lambda *_: None)


def run(folder: Path, formulation: Any, **options: Any) -> Toy:
    callbacks = [ViolationCurves(), *options.pop("callbacks", [])]
    module = Toy(formulation, options.pop("constraints", None), partial=True)
    return fit(module, ROWS, held_out=HELD_OUT, callbacks=callbacks, default_root_dir=folder)


def table(folder: Path, epoch: int) -> pd.DataFrame:
    found = pd.read_parquet(folder / f"violations/values/epoch_{epoch:04d}.parquet")
    assert (found.epoch == epoch).all()
    return found.set_index(KEY, verify_integrity=True).sort_index().drop(columns="epoch")


def rows_of(stage: str, name: str, index: Any, column: Any, v: Any, m: Any) -> pd.DataFrame:
    values = {"index": index, "column": column, "violation": v, "multiplier": m}
    return pd.DataFrame({"stage": stage, "constraint": name, **values})


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize(
    "formulation", [Pointwise(alpha=1.0, dual_lr=1.0), Average(dual_lr=0.5), None]
)
def test_tables_hold_every_violation_and_multiplier(formulation: Any, tmp_path: Path) -> None:
    witness = Witness(BOUNDS)
    module = run(tmp_path, formulation, callbacks=[witness])
    # Held-out values of the last epoch are those of the final weights.
    with torch.no_grad():
        z = torch.tanh(HELD_OUT.x @ module.first) @ module.last
    values = {"fit": z[:, None] + 0.3, "pair": 0.2 - z[:, None] * HELD_OUT.x[:, :PAIRS]}
    held_out = []
    for name in BOUNDS:
        at = HELD_OUT.has[name].reshape(9, -1).nonzero(as_tuple=True)
        held_out.append(rows_of("val", name, *at, values[name][at], np.nan))
    for epoch in range(3):
        wanted = held_out if epoch == 2 else []
        for visit in witness.of_epoch(epoch):
            for name in BOUNDS:
                row, column = visit.mask[name].nonzero()
                multiplier = np.nan
                if formulation is not None:
                    final = witness.of_epoch(epoch)[-1].after[name]
                    multiplier = final[visit.index[row], column] if final.ndim else final
                v = visit.violation[name][row, column]
                part = rows_of("running", name, visit.index[row], column, v, multiplier)
                wanted = [*wanted, part]
        found = table(tmp_path, epoch)
        found = found if epoch == 2 else found.loc[["running"]]
        expected = pd.concat(wanted).set_index(KEY).sort_index()
        pd.testing.assert_frame_equal(found, expected, check_dtype=False, check_index_type=False)


@pytest.mark.usefixtures("_undrawn")
def test_multipliers_of_an_average_interval_are_its_sides(tmp_path: Path) -> None:
    module = run(tmp_path, Average(dual_lr=0.5), constraints=INTERVALS)
    upper, lower = module.multipliers["pair"].tolist()
    assert upper != lower
    found = table(tmp_path, 2).loc["running", "pair"].reset_index()
    expected = np.where(found.column < PAIRS, upper, lower)
    np.testing.assert_allclose(found.multiplier, expected, rtol=1e-6)


@pytest.mark.usefixtures("_undrawn")
def test_a_mean_over_another_number_of_columns_in_every_batch(tmp_path: Path) -> None:
    """As of candidates that are padded to the longest list of the batch."""

    class Varying(Toy):
        def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
            return {"fit": outputs[:, None] + torch.arange(len(outputs))}

    module = Varying(Average(), {"fit": INTERVALS["fit"]}, learning_rate=0.0)
    hardest = HardestSamples()
    callbacks = [ViolationCurves(), hardest]
    fit(module, ToyRows(7), epochs=2, callbacks=callbacks, default_root_dir=tmp_path)
    z = module({"x": ToyRows(7).x}).detach().numpy()
    found = table(tmp_path, 1).loc["running", "fit"].reset_index()
    assert len(found) == 2 * (4 * 4 + 3 * 3)
    lower = found.column >= 4
    value = z[found["index"]] + found.column % 4
    np.testing.assert_allclose(found.violation, np.where(lower, -0.2 - value, value - 0.3), 1e-5)
    assert int(hardest._mean.visits["fit"].sum()) == 2 * len(found)


def test_pictures_and_the_folder_of_tables_as_one(tmp_path: Path) -> None:
    run(tmp_path, Pointwise())
    whole = pd.read_parquet(tmp_path / "violations/values")
    assert sorted(set(whole.epoch)) == [0, 1, 2]
    assert len(whole) == sum(len(table(tmp_path, epoch)) for epoch in range(3))
    pictures = [imread(path) for path in sorted(tmp_path.glob("violations/pictures/*.png"))]
    assert len(pictures) == 3
    drawn = [(picture[..., :3] < 0.99).any(2).mean() for picture in pictures]
    assert min(*drawn, 1) > 0.01
    assert drawn[0] < drawn[2]  # A curve an epoch.


@pytest.mark.usefixtures("_undrawn")
def test_a_second_run_writes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    """It took the tables of an earlier run away and left its pictures among its own."""
    run(tmp_path, Pointwise())
    before = table(tmp_path, 2)
    module, callback = Toy(Pointwise(), partial=True), ViolationCurves()
    for _ in range(2):  # A callback that is used again is another run's, too.
        fit(module, ROWS, epochs=1, callbacks=[callback], default_root_dir=tmp_path)
    names = {
        n: sorted(p.name for p in tmp_path.glob(f"{n}/values/*")) for n in os.listdir(tmp_path)
    }
    first = [f"epoch_000{epoch}.parquet" for epoch in range(3)]
    assert names == {
        "violations": first,
        "violations-1": first[:1],
        "violations-2": first[:1],
    }
    pd.testing.assert_frame_equal(table(tmp_path, 2), before)


@pytest.mark.usefixtures("_undrawn")
def test_resumed_in_mid_epoch_equals_uninterrupted(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mid.ckpt"

    def go(folder: Path, path: Path | None, save: bool) -> None:
        savers = [At(8, lambda trainer: trainer.save_checkpoint(checkpoint))] if save else []
        runner = trainer(
            max_epochs=3, callbacks=[ViolationCurves(), *savers], default_root_dir=folder
        )
        module = Toy(Pointwise(alpha=1.0, dual_lr=1.0), partial=True)
        runner.fit(module, ToyData(ROWS, HELD_OUT, batch_size=4), ckpt_path=path)

    go(tmp_path / "whole", None, save=True)
    go(tmp_path / "resumed", checkpoint, save=False)
    assert not list((tmp_path / "resumed").rglob("epoch_0000.*"))
    for epoch in (1, 2):
        resumed, whole = (table(tmp_path / name, epoch) for name in ("resumed", "whole"))
        pd.testing.assert_frame_equal(resumed, whole, check_exact=True)


@pytest.mark.usefixtures("_undrawn")
def test_a_sanity_check_is_no_validation(tmp_path: Path) -> None:
    runner = trainer(
        callbacks=[ViolationCurves()],
        default_root_dir=tmp_path,
        num_sanity_val_steps=1,
        check_val_every_n_epoch=10,
    )
    runner.fit(Toy(Pointwise()), ToyData(ROWS, HELD_OUT, batch_size=4))
    assert set(table(tmp_path, 0).index.get_level_values("stage")) == {"running"}


def test_an_epoch_in_which_nobody_carries_a_constraint_has_no_picture(tmp_path: Path) -> None:
    """It ended the run: "Number of rows must be a positive integer, not 0"."""
    rows = ToyRows(9, seed=2, partial=True)
    rows.has["objective"][:] = True
    for name in BOUNDS:
        rows.has[name][:] = False
    module = Toy(Pointwise(), partial=True)
    callbacks = [ViolationCurves()]
    fit(module, rows, epochs=1, held_out=rows, callbacks=callbacks, default_root_dir=tmp_path)
    assert module.trainer.global_step == 3
    assert table(tmp_path, 0).empty
    assert not list(tmp_path.glob("violations/pictures/*.png"))
