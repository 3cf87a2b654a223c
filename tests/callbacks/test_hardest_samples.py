"""The list names the samples that fight their constraint, with what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from pl_pointwise import Average, Constraint, Pointwise, Relaxed
from pl_pointwise.callbacks import HardestSamples
from pl_pointwise.callbacks.hardest_samples import hardest
from pl_pointwise.data import IndexedDataset, PointwiseSampler, ResumableDataLoader
from tests.callbacks.witness import Witness
from tests.pl_pointwise.line_task import LineData, LineModule
from tests.pl_pointwise.toy import At, Toy, ToyData, ToyRows, fit, stack, trainer

HOSTILE = (
    "</dd><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\"' onmouseover='x' &lt; \u202eright to left\x00 end"
)


class Mislabelled(LineData):
    """One of the five training points is far off the line, and its text is hostile."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        rows = [dict(row) for row in self.datasets["train"]]
        rows[3]["y"] = rows[3]["y"] - 7
        self.texts = [f"point {i}" for i in range(5)]
        self.texts[3] = HOSTILE
        self.datasets["train"] = rows

    def describe(self, index: int) -> dict[str, str]:
        return {"text <b>": self.texts[index]}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "hardest/samples.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def fit_line(folder: Path, data: Any, **options: Any) -> LineModule:
    module = LineModule(Pointwise(alpha=1.0, dual_lr=1.0))
    runner = trainer(
        max_epochs=6, callbacks=[HardestSamples(**options)], default_root_dir=folder
    )
    runner.fit(module, data)
    return module


def test_a_wrong_label_comes_first_and_hostile_text_stays_text(tmp_path: Path) -> None:
    fit_line(tmp_path, Mislabelled(batch_size=2), count=2)
    first, second = rows_of(tmp_path)
    assert (first["index"], first["rank"], first["constraint"]) == (3, 1, "fit")
    assert first["multiplier"] > second["multiplier"] > 0
    assert first["price"] > second["price"] > 0
    assert first["text"] == {"text <b>": HOSTILE}


@pytest.mark.parametrize(
    "formulation",
    [Pointwise(alpha=0.8, dual_lr=1.2), Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9)],
)
def test_figures_are_those_of_the_visits(formulation: Any, tmp_path: Path) -> None:
    witness = Witness({"fit": (-0.3, None), "pair": (None, 0.2)})
    module = fit(
        Toy(formulation, partial=True),
        ToyRows(23, seed=2, partial=True),
        callbacks=[witness, HardestSamples(count=7)],
        default_root_dir=tmp_path,
    )
    rows = rows_of(tmp_path)
    assert {row["constraint"] for row in rows} == {"fit", "pair"}
    for name, table in module.multipliers.items():
        listed = [row for row in rows if row["constraint"] == name]
        assert [row["rank"] for row in listed] == list(range(1, len(listed) + 1))
        means = mean_after_the_first(witness, name, table.shape)
        largest = np.nan_to_num(means, nan=-np.inf).max(1)
        resists = (table != 0).numpy().any(1) | (largest > 0)
        order = [i for i in np.argsort(-largest, kind="stable").tolist() if resists[i]]
        assert [row["index"] for row in listed] == order[:7]
        for row in listed:
            column = row["column"]
            assert row["mean_violation"] == pytest.approx(
                largest[row["index"]], rel=1e-5
            )
            assert means[row["index"], column] == largest[row["index"]]
            of = 3 if name == "pair" else 1
            assert row["value"] == {"number": column + 1, "of": of, "bound": None}
            seen = [
                v for v in witness.visits if row["index"] in v.index and v.epoch == 2
            ]
            (place,) = np.flatnonzero(seen[0].index == row["index"])
            v = seen[0].violation[name][place, column]
            assert row["epoch"] == 2
            multiplier = float(table[row["index"], column])
            assert row["multiplier"] == pytest.approx(multiplier)
            assert row["violation"] == pytest.approx(v, rel=1e-5, abs=1e-6)
            if isinstance(formulation, Pointwise):
                assert row["relaxation"] is None
                continue
            u = max(0.0, multiplier + 2 * 0.8 * v) / (2 * (0.8 + 1.7))
            assert row["relaxation"] == pytest.approx(u, rel=1e-4, abs=1e-6)


def mean_after_the_first(witness: Witness, name: str, shape: torch.Size) -> Any:
    """Of every sample and column, from what the witness saw; NaN where nothing is carried."""
    means = np.full(shape, np.nan)
    for index in range(shape[0]):
        visits = [v for v in witness.visits if index in v.index]
        found = np.concatenate([v.violation[name][v.index == index] for v in visits])[
            1:
        ]
        carried = np.concatenate([v.mask[name][v.index == index] for v in visits])[1:]
        means[index] = np.where(carried, found, np.nan).mean(0)
    return means


def test_without_multipliers_per_sample_the_list_is_empty(tmp_path: Path) -> None:
    fit(
        Toy(Average()),
        ToyRows(9),
        callbacks=[HardestSamples()],
        default_root_dir=tmp_path,
    )
    assert rows_of(tmp_path) == []


def test_a_plain_loader_gives_the_rows_texts_and_numbers(tmp_path: Path) -> None:
    x, y = torch.ones(4, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    dataset = IndexedDataset([{"x": x, "y": y, "who": "a", "tokens": [1] * 99}] * 6)
    kept = ("x", "y", "index")
    loader: DataLoader[Any] = ResumableDataLoader(
        dataset,
        PointwiseSampler(dataset),
        3,
        lambda rows: stack([{name: row[name] for name in kept} for row in rows]),
    )
    runner = trainer(callbacks=[HardestSamples(count=1)], default_root_dir=tmp_path)
    runner.fit(Toy(Pointwise()), loader)
    text = {"x": "1, 1, 1, 1", "y": "1.5", "who": "a", "index": "0"}
    assert rows_of(tmp_path)[0]["text"] == text


def test_resumed_list_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mid.ckpt"
    lists = []
    for path in (None, checkpoint):
        saver = At(4, lambda trainer: trainer.save_checkpoint(checkpoint))
        folder = tmp_path / str(path is None)
        callbacks = [HardestSamples(), *([saver] if path is None else [])]
        runner = trainer(max_epochs=1, callbacks=callbacks, default_root_dir=folder)
        data = ToyData(ToyRows(23), batch_size=4)
        runner.fit(Toy(Relaxed(beta=2.0)), data, ckpt_path=path)
        lists.append(rows_of(folder))
    assert lists[0] == lists[1]
    assert lists[0]


def test_a_second_fit_with_the_callback_starts_anew(tmp_path: Path) -> None:
    """It went on with the means of another module's samples, or broke where there are more."""
    callback = HardestSamples()
    for folder, count, seed in (("before", 8, 0), ("again", 12, 1), ("alone", 12, 1)):
        used = HardestSamples() if folder == "alone" else callback
        runner = trainer(
            max_epochs=3, callbacks=[used], default_root_dir=tmp_path / folder
        )
        runner.fit(
            Toy(Pointwise(alpha=0.8)), ToyData(ToyRows(count, seed), batch_size=4)
        )
    assert rows_of(tmp_path / "again") == rows_of(tmp_path / "alone")


def test_the_mean_violation_ranks_then_the_size_of_the_multiplier() -> None:
    nan = float("nan")
    means = torch.tensor([[0.5], [2.0], [nan], [nan], [nan], [0.5], [-1.0], [-2.0]])
    multipliers = torch.tensor(
        [[0.1], [0.0], [0.2], [-0.7], [0.0], [0.3], [0.0], [0.1]]
    )
    found = hardest(means, multipliers, torch.zeros(8, 1), 10)
    # Those without a visit last; 4 and 6 resist not.
    assert found == [(index, 0) for index in (1, 5, 0, 7, 3, 2)]


def test_equality_shows_its_distance_and_its_signed_multiplier(tmp_path: Path) -> None:
    module = Toy(
        Pointwise(alpha=1.0, dual_lr=1.0),
        {"fit": Constraint(equals=0.3)},
        learning_rate=0.0,
    )
    runner = trainer(callbacks=[HardestSamples()], default_root_dir=tmp_path)
    runner.fit(module, ToyData(ToyRows(9), batch_size=3))
    rows = rows_of(tmp_path)
    assert len(rows) == 9
    assert all(
        row["violation"] == pytest.approx(abs(row["multiplier"])) for row in rows
    )
    assert {row["multiplier"] > 0 for row in rows} == {True, False}


def test_a_second_run_writes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    callback = HardestSamples()
    for _ in range(2):  # A callback that is used again is another run's, too.
        fit(
            Toy(Pointwise()),
            ToyRows(5),
            epochs=1,
            callbacks=[callback],
            default_root_dir=tmp_path,
        )
    assert {path.name for path in tmp_path.iterdir()} == {"hardest", "hardest-1"}
