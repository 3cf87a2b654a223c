"""What the command line shows of a run: one bar, one table, and of how many a rate is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise.cli import main
from pl_pointwise.command_line.metrics_table import metrics_table
from pl_pointwise.report.progress import RunProgressBar
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, trainer

LINE = ["--model", "tests.pl_pointwise.line_task.LineModule"]
LINE += [
    "--data",
    "tests.pl_pointwise.line_task.LineData",
    "--trainer.accelerator",
    "cpu",
]


@pytest.fixture(autouse=True)
def as_users_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, with Lightning's own messages on."""
    monkeypatch.chdir(tmp_path)
    noise = logging.getLogger("lightning.pytorch")
    before = noise.level
    noise.setLevel(logging.INFO)
    yield
    noise.setLevel(before)


def test_fit_ends_with_one_table_and_the_run_in_one_bar(capsys) -> None:
    main(["fit", *LINE, "--trainer.max_epochs", "3"])
    shown = capsys.readouterr().out
    assert shown.count("requirement  violated") == 1
    assert shown.index("fit ≤ 0.1") < shown.index("Written to")
    bars = re.findall(
        r"Epoch (\d): +\d+%\S+ (\d+)/(\d+) .*violated=(\d+ of \d+)", shown
    )
    total = {int(total) for _, _, total, _ in bars}
    assert len(total) == 1
    assert max(int(step) for _, step, _, _ in bars) == total.pop()
    assert bars[-1][0] == "2"


@pytest.mark.parametrize(
    "options",
    [
        ["--trainer.enable_progress_bar", "false"],
        ["--trainer.callbacks+", "DualMonitor"],
    ],
)
def test_a_bar_or_callbacks_of_ones_own_stay(options: list[str], capsys: Any) -> None:
    main(["fit", *LINE, "--trainer.max_epochs", "1", *options])
    shown = capsys.readouterr().out
    assert ("violated=" in shown) == ("enable_progress_bar" not in options[0])
    assert "requirement  violated" in shown


def test_the_bar_shows_what_holds_of_all_samples(capsys) -> None:
    module = Toy()
    bar = RunProgressBar()
    runner = trainer(max_epochs=2, enable_progress_bar=True, callbacks=[bar])
    runner.fit(module, ToyData(ToyRows(9), batch_size=4))
    violated = sum(row.violated for row in module.closing.rows)
    number = sum(row.of for row in module.closing.rows)
    shown = capsys.readouterr().out.replace("\r", "\n").splitlines()
    last = [line for line in shown if "violated=" in line][-1]
    assert f"violated={violated} of {number}" in last
    assert "6/6" in last


def test_a_rate_says_of_how_many_it_is() -> None:
    metrics = {"test/over_refusal": torch.tensor(0.0), "train/kl": torch.tensor(0.5)}
    table = metrics_table(metrics, {"test/over_refusal": 4}).splitlines()
    assert [line.split() for line in table] == [
        ["test", "train"],
        ["over_refusal", "0", "(4)"],
        ["kl", "0.5"],
        ["In", "brackets:", "of", "how", "many."],
    ]
