"""Runs are independent: one after another or side by side, the results are the same.

What ends a run badly is said in its line.
"""

from __future__ import annotations

import csv
import errno
import subprocess
import sys
from pathlib import Path

import pytest

from pl_pointwise.cli import main
from pl_pointwise.compare import command, runner
from pl_pointwise.compare.runner import alone_in
from tests.pl_pointwise.compare.test_command import METHODS, write_files

ROOT = Path(__file__).resolve().parents[3]
POINTWISE = METHODS.splitlines()[-1] + "\n"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes import the tests' modules from there. Plots take longer than these runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)


def files(folder: Path, methods: str) -> list[str]:
    return [*write_files(folder, methods), "--trainer.max_epochs", "3"]


def lines(output: Path) -> dict[str, dict[str, str]]:
    return {line["method"]: line for line in csv.DictReader((output / "comparison.csv").open())}


def metrics(line: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in line.items() if "/" in name}


def test_runs_side_by_side_give_the_same_results(tmp_path, capsys) -> None:
    """As docs/compare.md has it: ``--only`` by xargs, then the tables."""
    common = files(tmp_path, POINTWISE + "plain: null\n")
    main(["compare", *common, "--output", str(tmp_path / "here")])
    apart = ["compare", *common, "--output", str(tmp_path / "apart")]
    command = ["xargs", "-P", "2", "-I", "N", sys.executable, "-m", "pl_pointwise", *apart]
    subprocess.run([*command, "--only", "N"], input="1\n2\n", text=True, check=True, timeout=200)
    assert not (tmp_path / "apart/comparison.csv").exists()
    capsys.readouterr()
    main(apart)
    assert capsys.readouterr().out.count("(finished before)") == 2
    here, there = lines(tmp_path / "here"), lines(tmp_path / "apart")
    for method in ("pointwise", "plain"):
        assert metrics(there[method]) == metrics(here[method])


def test_a_second_comparison_in_a_folder_is_refused_and_changes_nothing(tmp_path, capsys) -> None:
    common = [*files(tmp_path, POINTWISE), "--output", str(tmp_path / "out")]
    main(["compare", *common])
    result = tmp_path / "out/runs/pointwise/seed-0/result.json"
    before = result.read_text()
    with alone_in(tmp_path / "out"), pytest.raises(SystemExit):
        main(["compare", *common, "--model.tolerance", "0.4"])
    assert "out/.in-use.lock' could not be acquired" in capsys.readouterr().err
    with alone_in(result.parent), pytest.raises(SystemExit):
        main(["compare", *common, "--model.tolerance", "0.4", "--only", "1"])
    assert "seed-0/.in-use.lock' could not be acquired" in capsys.readouterr().err
    assert result.read_text() == before


def test_what_cannot_be_written_is_said_with_its_path_and_the_others_run(
    tmp_path, monkeypatch, capsys
) -> None:
    common = files(tmp_path, POINTWISE.replace("pointwise", "full", 1) + POINTWISE)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        main(["compare", *common, "--output", str(tmp_path / "file")])
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'file'}: File exists" in said
    assert "Traceback" not in said
    write = runner.write_whole

    def full(path: Path, text: str) -> None:
        if "full" in path.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(runner, "write_whole", full)
    with pytest.raises(SystemExit, match=r"1 run failed: full \(seed 0\)"):
        main(["compare", *common, "--output", str(tmp_path / "out")])
    found = lines(tmp_path / "out")
    assert "No space left on device" in found["full"]["error"]
    assert found["pointwise"]["error"] == ""


@pytest.mark.parametrize("number", ["0", "2"])
def test_a_number_outside_the_comparison_is_refused(tmp_path, capsys, number) -> None:
    common = [*files(tmp_path, POINTWISE), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        main(["compare", *common, "--only", number])
    assert "this comparison has 1 runs" in capsys.readouterr().err
