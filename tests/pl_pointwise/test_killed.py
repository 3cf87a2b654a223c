"""A Trainer and a plain loop, killed at random, end as if they had not been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.launch import run_on_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("door", "kills"), [("loop", 12), ("trainer", 12)])
def test_killed_runs_end_as_whole_ones(tmp_path: Path, door: str, kills: int) -> None:
    words = [str(tmp_path), door, str(kills)]
    run_on_ranks(0, "tests.programs.killed", words, tmp_path)
    assert f"{door}: {kills} kills" in (tmp_path / "program.log").read_text()
