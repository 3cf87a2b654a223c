"""Tunes, chooses, judges and reports, task by task; what is finished is not run again.

    python -m benchmarks.evidence --data RECORDS --models WEIGHTS --workers 2

1. tune    every setting of every method, seed 0, measured on the validation part
2. choose  per budget and method the best setting on the validation part -> choices.json
3. judge   the chosen settings with every seed, measured on the test part, seed after seed
4. report  the numbers of every run -> benchmarks/evidence/results; then the command
           python -m benchmarks.evidence.appendix makes tables and figures of them
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pl_pointwise.compare.runs import Run

from .errors import MissingError
from .report import write_report
from .stages import choices_of, to_judge, tune_runs, write_choices
from .study import STUDIES, Planned, Study, load
from .workers import run_all

STAGES = ("tune", "choose", "judge", "report")


def main(words: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(words)
    # ends the workers
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    minutes = arguments.time_limit
    deadline = None if minutes is None else time.time() + 60 * minutes
    stages = STAGES if arguments.stage == "all" else (arguments.stage,)
    for name in arguments.task or STUDIES:
        study = load(
            name,
            arguments.data,
            arguments.models,
            arguments.output,
            arguments.quick,
            arguments.published,
        )
        try:
            _run(study, stages, arguments, deadline)
        except MissingError as error:
            print(f"{name}: skipped, {error}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--task", nargs="+", choices=STUDIES, help="without: all of them"
    )
    parser.add_argument("--stage", default="all", choices=(*STAGES, "all"))
    parser.add_argument(
        "--data", type=Path, help="folder of records: msmarco, when2call, …"
    )
    parser.add_argument("--models", type=Path, help="folder of weights")
    parser.add_argument("--output", type=Path, default=Path("results/evidence"))
    parser.add_argument(
        "--budgets",
        type=float,
        nargs="+",
        metavar="QUANTILE",
        help="instead of the task's own",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of judging"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of one thread each"
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="MINUTES", help="start no run after it"
    )
    # the committed results are of whole runs
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--quick", action="store_true", help="two steps a run, one setting a method"
    )
    either.add_argument(
        "--published",
        action="store_true",
        help="run nothing that the committed results hold",
    )
    return parser


def _to_run(planned: Sequence[Planned]) -> list[Run]:
    """The runs that are not published; those finished here are left to ``run_all``."""
    return [each.run for each in planned if each.published is None]


def _run(
    study: Study,
    stages: Sequence[str],
    arguments: argparse.Namespace,
    deadline: float | None,
) -> None:
    """One task through the stages; a stage that ran out of time ends it."""
    if "tune" in stages and study.settings_of is None:
        planned = tune_runs(study)
        print(f"{study.name}: tune, {len(planned)} runs", flush=True)
        if not run_all(_to_run(planned), arguments.workers, deadline):
            print(f"{study.name}: out of time; the same command goes on", flush=True)
            return
    if "choose" in stages:
        choices = choices_of(study, arguments.budgets)
        path = write_choices(study, choices)
        print(f"{study.name}: {len(choices)} choices -> {path}", flush=True)
    if "judge" in stages:
        chosen = to_judge(study)
        planned = [
            each for s in arguments.seeds for each in study.runs(chosen, "judge", s)
        ]
        print(
            f"{study.name}: judge, {len(chosen)} settings, {len(planned)} runs",
            flush=True,
        )
        if not run_all(_to_run(planned), arguments.workers, deadline):
            print(f"{study.name}: out of time; the same command goes on", flush=True)
    if "report" in stages:
        print(f"{study.name}: {write_report(study, arguments.seeds)}", flush=True)


if __name__ == "__main__":
    main()
