"""Writes the raw results of a study, from which ``appendix`` makes tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .results import RESULTS, Result, write_results
from .stages import to_judge, tune_runs
from .study import Planned, Study


def write_report(study: Study, seeds: Sequence[int]) -> Path:
    """Writes the numbers of every finished run, of a quick run beside its runs."""
    folder = study.output if study.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    tuning = [] if study.settings_of else tune_runs(study)
    chosen = to_judge(study)
    judged = [each for seed in seeds for each in study.runs(chosen, "judge", seed)]
    path = folder / f"{study.name}.csv"
    write_results([*_lines("tune", tuning), *_lines("judge", judged)], path)
    return path


def _lines(
    stage: str, runs: Sequence[Planned]
) -> list[tuple[str, str, str, int, Result]]:
    """The finished runs as lines of the table of raw results."""
    return [
        (stage, each.entry.method, each.entry.setting, each.run.seed, result)
        for each in runs
        if (result := each.result) is not None
    ]
