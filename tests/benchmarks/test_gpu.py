"""The command for the figures of a GPU: its records, its targets, and with --tiny the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


def figures(seconds: float, gib: float, loss: float = 0.7) -> dict[str, float]:
    return {
        "seconds": seconds, "tokens": 100.0, "samples": 4.0, "flops": 1e12, "peak_gib": gib,
        "loss": loss,
    }  # fmt: skip


def verdicts(rounds: gpu.Rounds, peak: float | None = None) -> dict[str, list[str]]:
    lines = gpu.page("a GPU", rounds, peak, tiny=False).splitlines()
    table = lines[lines.index("| target | asked | found | |") + 2 :]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {title: rest for title, *rest in cells}


def test_targets_are_judged_by_medians_and_beside_the_fastest_of_the_others() -> None:
    rounds = {
        "trl-dpo": [figures(1.7, 10.0), figures(1.6, 10.0), figures(9.0, 10.0)],
        "ours-dpo": [figures(1.0, 6.5)] * 3,
        "st-lambda": [figures(4.0, 10.0)],
        "st-lambda-one-pass": [figures(1.5, 20.0)],
        "ours-pointwise (re-ranking)": [figures(1.0, 5.0)],
    }
    found = verdicts(rounds)
    assert found["DPO, tokens/s beside TRL"] == ["≥ 1.6 ×", "1.70 ×", "met"]
    assert found["DPO, memory beside TRL"] == ["≤ 0.6 ×", "0.65 ×", "missed"]
    step = "re-ranking step, {} beside CrossEncoderTrainer"
    assert found[step.format("tokens/s")] == ["≥ 1.8 ×", "1.50 ×", "missed"]
    assert found[step.format("memory")] == ["≤ 0.6 ×", "0.50 ×", "met"]
    assert found["SimPO, tokens/s beside TRL"][-1] == "not measured"


def test_a_ratio_at_another_loss_is_no_ratio() -> None:
    rounds = {"trl-dpo": [figures(5, 1)], "ours-dpo": [figures(1, 1, loss=0.8)]}
    verdict = verdicts(rounds)["DPO, tokens/s beside TRL"][-1]
    assert verdict == "not comparable: loss 0.8000 and 0.7000"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_command_runs_with_small_shapes(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--tiny",
        "--output",
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    rounds = json.loads((tmp_path / "figures.json").read_text())["rounds"]
    for name in ("dpo", "simpo"):
        theirs, ours = (rounds[f"{side}-{name}"][0]["loss"] for side in ("trl", "ours"))
        assert ours == pytest.approx(theirs, abs=0.02)
    theirs, ours = (
        rounds[f"{side}-predict-bf16"][0]["mean_square"] for side in ("st", "ours")
    )
    assert ours == pytest.approx(theirs, abs=0.02)
    text = (tmp_path / "figures.md").read_text()
    assert "none of these figures means anything" in text
    assert "not comparable" not in text
