"""Whatever a terminal or a pipe takes, and whoever ends a command: no traceback, no escapes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pl_pointwise.cli import main
from pl_pointwise.command_line import cli_errors
from pl_pointwise.compare.tables import write_csv
from pl_pointwise.errors import DataError
from pl_pointwise.export.folder import check_export_folder, replaced_folder
from pl_pointwise.printing import Table, csv_cell, print_in_any_encoding, say
from pl_pointwise.requirements import Requirement, RequirementError
from pl_pointwise.requirements.samples import require_known

LETTERS = "λ ε · ≤ ± 模型 \u202e"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1", "cp437", "utf-8"])
def test_no_letter_ends_a_command(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    say(LETTERS)  # As at the end of a fit in a program of one's own.
    print_in_any_encoding()
    print(LETTERS, flush=True)
    assert written.getvalue().count(b"\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_fit_ends_well_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    env.pop("PYTHONUTF8", None)
    script = str(Path(sys.executable).with_name("pl-pointwise"))
    options = ["--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"]
    done = subprocess.run(
        [script, "fit", "--config", "family", *options],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert b"Next:" in done.stdout


HOSTILE = "\x1b[2Jcat\x1b]0;owned\x07"


def test_no_category_reaches_the_terminal_as_a_command() -> None:
    cells = pd.DataFrame({"category": [HOSTILE, "a|b", "<b>x"], "n": ["1", "2", "3"]})
    text = Table(HOSTILE.encode().hex(), "a note", cells).markdown()
    assert all(c.isprintable() or c == "\n" for c in text)
    columns = ["dataset", "kind", "quantity", "category"]
    samples = pd.DataFrame([["test", "constraint", "near", HOSTILE]], columns=columns)
    with pytest.raises(RequirementError) as error:
        require_known(samples, [Requirement.parse("near/dog: violated <= 0.1")])
    assert str(error.value).isprintable()


def test_an_error_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), cli_errors.short_errors("p"):
        raise DataError(f"there is no {HOSTILE}")
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "\t=1", "\r=1"]
)
def test_no_text_is_a_formula_of_a_spreadsheet(text: str, tmp_path: Path) -> None:
    assert csv_cell(text).startswith("'")
    run = type("Run", (), {"method": text, "seed": 0})()
    write_csv(
        [(run, {"metrics": {"test/x": -0.5}, "error": HOSTILE})], tmp_path / "a.csv"
    )
    [line] = pd.read_csv(tmp_path / "a.csv").to_dict("records")
    assert (line["method"][0], line["test/x"]) == ("'", -0.5)
    assert "\x1b" not in line["error"]


def test_an_interruption_is_one_line(monkeypatch: Any, capsys: Any) -> None:
    def interrupted(args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pl_pointwise.compare.command.main", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["compare", "--config", "x"])
    said = capsys.readouterr().err
    assert end.value.code == 130
    assert said.strip() == (
        "pl-pointwise compare: interrupted. The same command goes on with the runs that are not "
        "finished."
    )


@pytest.mark.slow
def test_ctrl_c_in_a_comparison_is_one_line(tmp_path: Path) -> None:
    """It was a traceback of 57 lines."""
    script = str(Path(sys.executable).with_name("pl-pointwise"))
    words = ["--trainer.max_epochs", "100000", "--trainer.accelerator", "cpu"]
    words += ["--trainer.enable_progress_bar", "false"]
    process = subprocess.Popen(
        [script, "compare", "--config", "family", "--output", "out", *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while (
        not list(tmp_path.glob("out/runs/*/*/config.yaml")) and time.monotonic() < until
    ):
        time.sleep(0.2)
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert "pl-pointwise compare: interrupted." in said
    assert process.returncode == 130


def test_an_export_without_a_card_is_exported_again(tmp_path: Path) -> None:
    """The second one took the first one's files for another's."""
    folder = tmp_path / "ex"
    for number in range(2):
        check_export_folder(folder)
        with replaced_folder(folder) as whole:
            whole.mkdir()
            (whole / "model.pt").write_text(str(number))
    assert (folder / "model.pt").read_text() == "1"
    (folder / "precious").touch()
    with replaced_folder(folder) as whole:
        whole.mkdir()
        (whole / "model.pt").touch()
    assert (folder / "precious").exists()
