"""``pl-pointwise compare``: one configuration × methods × settings × seeds, as tables and plots.

A run that is complete and whose configuration has not changed since is not run again; one that was
interrupted starts again; one that failed is a line that says why. docs/compare.md lists the files.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from pandas import DataFrame

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.cli_errors import CommandParser, fraction
from pl_pointwise.command_line.configs import overview
from pl_pointwise.data import PointwiseDataModule
from pl_pointwise.printing import Table, quieten
from pl_pointwise.report.page import FILE, write_if_possible
from pl_pointwise.requirements.samples import bounds_of, require_same_bounds

from .certification import answer_requirements
from .execution import run_all
from .page import page_of_comparison
from .plots import PLOTS
from .plots import draw as draw_plots
from .preconditions import check_requirements
from .runs import Comparison, Outcome, alone_in, errors_of, on_first_rank
from .tables import tables, write_csv

SPENT = (
    "Without --require the tables show the test data, which can then certify no model any more. To "
    "certify one, stop here (Ctrl-C) and give --require."
)
"""Before anything is shown: what a comparison costs that looks at the certification split."""


def main(args: Sequence[str]) -> None:
    """Runs the command; unknown options, ``--trainer.max_epochs 1`` for one, go to every run."""
    quieten()
    parser = _parser()
    options, overrides = parser.parse_known_args(list(args))
    comparison = Comparison(
        configs=options.config,
        output=options.output,
        methods=options.methods,
        # Each once: a run that is counted twice shows no spread.
        seeds=[*dict.fromkeys(options.seeds)],
        settings=options.set,
        overrides=overrides,
        requirements=options.require,
        confidence=options.confidence,
    )
    count = len(comparison.runs)
    if options.only is not None:
        if not 1 <= options.only <= count:
            parser.error(f"--only {options.only}: this comparison has {count} runs.")
        [(run, result)] = run_all([comparison.runs[options.only - 1]])
        if "error" in result:
            raise SystemExit(f"{run.title} failed: {result['error']}")
        return
    start = check_methods(comparison)
    if on_first_rank():
        runs = "1 run" if count == 1 else f"{count:,} runs"
        print(
            f"{runs}: of each method, setting and seed one; --only N is the N-th.",
            flush=True,
        )
    failed = compare(comparison, start, options.note)
    if failed:
        runs = "1 run" if len(failed) == 1 else f"{len(failed)} runs"
        raise SystemExit(f"{runs} failed: {', '.join(failed)}; see the table.")


def _parser() -> CommandParser:
    parser = CommandParser("compare", __doc__.split("\n")[0], overview())
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        required=True,
        default=[],
        help="base, then what changes it; name or path",
    )
    parser.add_argument(
        "--methods",
        help="YAML of name: change; name or path. Without: the configuration alone",
    )
    parser.add_argument(
        "--set",
        metavar="PATH=V,V,…",
        help="sweep model.formulation.init_args.beta=0.1,1,10; several give every combination",
        action="append",
        default=[],
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for runs and results"
    )
    parser.add_argument(
        "--require",
        metavar="REQUIREMENT",
        help="what the chosen model has to meet on new inputs: 'relevance: violated <= 0.05', "
        "'over_refusal <= 0.05', 'lost(relevance) <= 0.02'; several hold together",
        action="append",
        default=[],
    )
    parser.add_argument(
        "--confidence",
        type=fraction,
        default=0.95,
        help="of the certificate, the choice included",
    )
    parser.add_argument(
        "--note",
        default="",
        help="what stands above every table and plot, such as 'A trial of five steps'",
    )
    parser.add_argument(
        "--only", type=int, metavar="N", help="the N-th run, and no tables"
    )
    return parser


def check_methods(comparison: Comparison) -> DataFrame | None:
    """Builds every method that has a run to come, and refuses the first that cannot run.

    Returns what the starting model measures, if something is required.
    """
    bounds = {}
    to_come = {}
    for run in comparison.runs:
        result = run.result() or {}
        if "bounds" in result:
            bounds[run.title] = result["bounds"]
        # Of a method with several seeds one is built: they differ in nothing that can be wrong.
        if not run.finished:
            to_come[run.method] = run
    shows_splits = False
    for run in to_come.values():
        gc.collect()  # The next model is loaded.
        with errors_of(run.method):
            cli = PointwiseCLI(run.arguments, run=False)
            _check_data(cli)
            bounds[run.title] = bounds_of(cli.model)
            # Only such data have a split that could certify.
            shows_splits |= isinstance(cli.datamodule, PointwiseDataModule)
            del cli
    if not comparison.requirements:
        if shows_splits and on_first_rank():
            print(SPENT, flush=True)
        return None
    require_same_bounds(bounds)
    return check_requirements(comparison)


def _check_data(cli: PointwiseCLI) -> None:
    """That files are there, of the data module's options ``…_file``, and test data."""
    arguments = (cli.config_dump.get("data") or {}).get("init_args") or {}
    for name, path in arguments.items():
        # Not of an address, which only its own library can look up.
        local = name.endswith("_file") and isinstance(path, str) and "://" not in path
        if local and not Path(path).expanduser().exists():
            raise FileNotFoundError(f"data.{name}: there is no file {path}.")
    source: Any = cli.datamodule or cli.model
    if not is_overridden("test_dataloader", source):
        raise ValueError(
            f"{type(source).__name__} has no test_dataloader(), and every method is measured by "
            "`test`. Define it."
        )


def compare(
    comparison: Comparison, start: DataFrame | None, note: str = ""
) -> list[str]:
    """Runs what is left, then writes tables and plots; returns what failed.

    start: of :func:`check_methods`.
    note: stands above the tables and in the plots.
    """
    gc.collect()  # The starting model.
    output = comparison.output
    with alone_in(output):
        outcomes = run_all(comparison.runs)
        shown = list[Table]()
        if on_first_rank():
            shown = _write_results(outcomes, output, note)
        # Without a requirement there is nothing to answer.
        if start is not None:
            answer = answer_requirements(comparison, outcomes, start)
            if answer is not None:  # On the first rank.
                _write_page(outcomes, [answer, *shown], output, note)
    return [
        f"{run.method} (seed {run.seed})"
        for run, result in outcomes
        if "error" in result
    ]


def _write_results(outcomes: Sequence[Outcome], output: Path, note: str) -> list[Table]:
    """Writes tables, plots and the page, and prints the first table; returns the tables."""
    shown = tables(outcomes, note)
    write_csv(outcomes, output / "comparison.csv")
    text = "\n".join(table.markdown() for table in shown)
    (output / "comparison.md").write_text(text, encoding="utf-8")
    print(f"\n{shown[0].markdown()}", flush=True)
    done = [(run, result) for run, result in outcomes if "error" not in result]
    if done:
        draw_plots(done, output, note)
    drawn = [name for name in PLOTS if (output / name).is_file()]
    print(
        f"Written to {output}: {', '.join(['comparison.md', 'comparison.csv', *drawn])}"
    )
    _write_page(outcomes, shown, output, note)
    return shown


def _write_page(
    outcomes: Sequence[Outcome], shown: Sequence[Table], output: Path, note: str
) -> None:
    path = output / FILE
    path.unlink(missing_ok=True)  # Of an earlier attempt.
    page = write_if_possible(
        path, lambda: page_of_comparison(outcomes, shown, output, note)
    )
    if page is not None:
        print(f"Tables, plots and a drawer for each run: open {page}")
