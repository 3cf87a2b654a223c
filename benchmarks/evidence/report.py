"""Tables, plots and raw results of one task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .choice import Choice, best_of, grouped
from .grids import Entry
from .plots import draw
from .results import RESULTS, Result, write_results
from .stages import to_judge, tune_runs, tuned
from .statistics import Estimate, estimate, paired_difference
from .study import STATISTICS, Metrics, Planned, Study, Value

BySeed = dict[int, Metrics]


@dataclass(frozen=True)
class Judged:
    """The chosen settings of one task with what they reached on the test part."""

    study: Study
    choices: Sequence[Choice]
    seeds: Sequence[int]

    @cached_property
    def runs(self) -> list[Planned]:
        chosen = to_judge(self.study)
        return [each for seed in self.seeds for each in self.study.runs(chosen, "judge", seed)]

    @cached_property
    def results(self) -> dict[str, BySeed]:
        """Metrics by method with setting, and seed, of the runs that are finished."""
        found: dict[str, BySeed] = {}
        for planned in self.runs:
            if (result := planned.result) is not None:
                found.setdefault(planned.entry.name, {})[planned.run.seed] = result["metrics"]
        return found

    def scales(self) -> dict[str, Value]:
        """Returns the scale of the scores, by title: a metric, or a mean log-likelihood."""
        scales: dict[str, Value] = {}
        for title, of in self.study.described["scale"].items():
            if isinstance(of, str):
                scales[title] = _of(f"test/{of}")
            else:
                constraint, sign, tolerance = of["constraint"], of["sign"], of["tolerance"]
                key = f"test/{constraint}/mean"
                scales[title] = lambda metrics, key=key, sign=sign, tolerance=tolerance: (
                    tolerance + sign * metrics.get(key, math.nan)
                )
        return scales

    def by_seed(self, name: str, value: Value) -> dict[int, float]:
        return {seed: value(metrics) for seed, metrics in self.results.get(name, {}).items()}


def write_report(judged: Judged) -> list[Path]:
    """Writes tables, plot and raw results, of a quick run beside its runs; returns the files."""
    study = judged.study
    folder = study.output if study.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    text = fragment(judged)
    written = [folder / f"{study.name}.md", folder / f"{study.name}.csv"]
    tuning = [] if study.settings_of else tune_runs(study)
    write_results([*_lines("tune", tuning), *_lines("judge", judged.runs)], written[1])
    plot = folder / f"{study.name}.png"
    if draw(judged, [] if study.settings_of else tuned(study), plot):
        written.append(plot)
        text = f"![Objective against violations, {study.title}]({plot.name})\n\n{text}"
    written[0].write_text(text, encoding="utf-8")
    return written


def _lines(stage: str, runs: Sequence[Planned]) -> list[tuple[str, str, str, int, Result]]:
    """The finished runs as lines of the table of raw results."""
    return [
        (stage, each.entry.method, each.entry.setting, each.run.seed, result)
        for each in runs
        if (result := each.result) is not None
    ]


def fragment(judged: Judged) -> str:
    """Returns the tables of a task as Markdown."""
    study = judged.study
    seeds = sorted({seed for found in judged.results.values() for seed in found})
    parts = [
        f"{study.title}. Mean ± half the 95 % t-interval over {len(seeds)} seeds; violations "
        f"test · train{', mean over the constraints' if len(study.constraints) > 1 else ''}. "
        "Same test records for every seed; training records and initialisation of the seed.\n"
    ]
    for (quantile, criterion), choices in grouped(judged.choices).items():
        budget = choices[0].budget
        where = f" of the task {study.settings_of}" if study.settings_of else ""
        parts.append(
            f"**Budget {budget:.3g}**{where} ({quantile:.0%} of the settings' objectives on "
            f"validation), chosen by `{criterion}`:\n"
        )
        references = [] if len(parts) > 2 else referred(judged.study)
        parts.append(markdown(method_lines(judged, choices, references)))
        if missing := without_choice(judged.study, choices):
            parts.append(f"Without a setting within the budget: {', '.join(missing)}.\n")
        if found := paired_lines(judged, choices):
            parts.append(markdown(found))
    return "\n".join(parts)


def referred(study: Study) -> list[Entry]:
    """Returns the methods that have nothing to tune."""
    return [entry for entry in study.entries() if entry.role == "reference"]


def without_choice(study: Study, choices: Sequence[Choice]) -> list[str]:
    """Returns the tuned methods that have no choice among these."""
    if study.settings_of is not None:
        return []
    chosen = {choice.validation.entry.method for choice in choices}
    methods = (entry.method for entry in study.entries() if entry.role != "reference")
    return [method for method in dict.fromkeys(methods) if method not in chosen]


def method_lines(
    judged: Judged, choices: Sequence[Choice], references: Sequence[Entry]
) -> list[list[str]]:
    """Returns a line per reference and chosen method."""
    scales = judged.scales()
    several = judged.study.constraints if len(judged.study.constraints) > 1 else []
    each_of = [f"`{name}` test: CVaR95; violated" for name in several]
    common = ["method", "setting", "objective", "CVaR95", "share violated"]
    lines = [[*common, *each_of, *scales, "seeds"]]
    for entry in [*references, *(choice.validation.entry for choice in choices)]:
        seeds = judged.results.get(entry.name)
        if not seeds:
            lines.append([entry.method, entry.setting, *[""] * (len(lines[0]) - 3), "0"])
            continue
        cells = [_cell(seeds, judged.study.value("objective"))]
        for name in ("cvar95", "violated"):
            both = (_cell(seeds, judged.study.value(name, stage)) for stage in ("test", "train"))
            cells.append(" · ".join(both))
        for constraint in several:
            both = (_cell(seeds, _of(f"test/{constraint}/{n}")) for n in ("cvar95", "violated"))
            cells.append("; ".join(both))
        cells += [_cell(seeds, value) for value in scales.values()]
        lines.append([entry.method, entry.setting, *cells, str(len(seeds))])
    return lines


def paired_lines(judged: Judged, choices: Sequence[Choice]) -> list[list[str]]:
    """Returns a line per difference of test results at equal seeds.

    Each of ours minus the best rival, then the best of ours minus each other rival. The best ones
    are those that were best on validation data: test data choose nothing.
    """
    rival, best = best_of(choices, "rival"), best_of(choices, "ours")
    if rival is None or best is None:
        return []
    ours, rivals = ([c for c in choices if c.validation.entry.role == r] for r in ("ours", "rival"))
    pairs = [(choice, rival) for choice in sorted(ours, key=lambda choice: choice != best)]
    pairs += [(best, choice) for choice in rivals if choice != rival]
    names = [choice.validation.entry.method for choice in (best, rival)]
    header = "best on validation: {}, of the rivals {}".format(*names)
    lines = [[header, "objective", "CVaR95", "share violated"]]
    for first, second in pairs:
        mine, other = first.validation.entry, second.validation.entry
        found = [difference(judged, mine.name, other.name, name) for name in STATISTICS]
        lines.append([f"{mine.method} − {other.method}", *map(_difference_cell, found)])
    return lines


def difference(judged: Judged, first: str, second: str, name: str) -> Estimate | None:
    """Returns the paired difference of a statistic on the test part."""
    value = judged.study.value(name)
    return paired_difference(judged.by_seed(first, value), judged.by_seed(second, value))


def _of(name: str) -> Value:
    """Returns what reads a metric by its whole name, NaN where a run has none of it."""
    return lambda metrics: metrics.get(name, math.nan)


def _cell(seeds: BySeed, value: Value) -> str:
    return str(estimate([value(metrics) for metrics in seeds.values()]))


def _difference_cell(found: Estimate | None) -> str:
    """Bold where the interval excludes zero."""
    if found is None:
        return ""
    return f"**{found}**" if found.sign else str(found)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table of Markdown; the first line is the header."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in ruled
        )
        + "\n"
    )
