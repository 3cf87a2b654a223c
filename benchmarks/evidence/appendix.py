"""The figures of docs/evidence.md and the tables of docs/appendix, from the committed CSV files.

    python -m benchmarks.evidence.appendix [--tables]

``--tables`` leaves the figures as they are. The tables are pages of the site, which ``make docs``
writes anew and git ignores: there a link to a CSV file leads to its tables. What they say depends
on ``benchmarks/evidence/results/*.csv`` alone; nothing is run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from .plots import Compared, forest, weights
from .results import RESULTS, read_results
from .statistics import Estimate, estimate, holm, p_value, paired_difference
from .study import STUDIES, Metrics, Study

DOCS = Path(__file__).parents[2] / "docs"
DEFAULTS = ("Pointwise(), untuned", "Relaxed(price=10), untuned")
FIGURE = ("safety", "reranker-corpus")
"""The studies with five seeds in which a violation rate on new inputs can be lowered."""
MEASURES = {
    "objective": ("objective", "test"),
    "violated, new": ("violated", "test"),
    "violated, training": ("violated", "train"),
    "CVaR95, new": ("cvar95", "test"),
    "CVaR95, training": ("cvar95", "train"),
}
Reached = dict[str, dict[int, Metrics]]


def reached(study: Study, stage: str) -> Reached:
    """The metrics of a stage by method with setting, and seed."""
    found: Reached = {}
    for (of, name, seed), result in read_results(RESULTS / f"{study.name}.csv").items():
        if of == stage:
            found.setdefault(name, {})[seed] = result["metrics"]
    return found


def measured(study: Study, of: Mapping[int, Metrics], measure: str) -> dict[int, float]:
    read = study.value(*MEASURES[measure])
    return {seed: read(metrics) for seed, metrics in of.items()}


def differences(study: Study) -> Iterator[tuple[str, str, str, Estimate, float]]:
    """Each untuned default minus each tuned baseline: default, baseline, measure, difference, p."""
    judged = reached(study, "judge")
    roles = {entry.name: entry.role for entry in study.entries()}
    for default in DEFAULTS:
        for name, of in judged.items():
            if default in judged and roles.get(name) == "rival":
                for measure in list(MEASURES)[:3]:
                    both = (
                        measured(study, each, measure) for each in (judged[default], of)
                    )
                    found = paired_difference(*(pair := tuple(both)))
                    assert found is not None
                    yield default, name, measure, found, p_value(*pair)


def page_of_a_study(study: Study) -> str:
    parts = [f"# {study.title}\n"]
    judged = reached(study, "judge")
    seeds = max(len(of) for of in judged.values())
    several = " Rates and CVaR95 are means over the constraints." * (
        len(study.constraints) > 1
    )
    parts.append(
        f"Objective: `{study.objective}` on new inputs. Mean over {seeds} seeds ± half a 95 % "
        f"interval of Student's t.{several} `auto` is the automatic rule before the present one. "
        f"Every setting that was tried: `benchmarks/evidence/results/{study.name}.csv`.\n"
    )
    parts.append("## Chosen settings, test data\n")
    lines = [["method", "seeds", *MEASURES]]
    for name, of in judged.items():
        cells = [
            str(estimate([*measured(study, of, each).values()])) for each in MEASURES
        ]
        lines.append([name, str(len(of)), *cells])
    parts.append(markdown(lines))
    if found := list(differences(study)):
        parts.append("## Untuned defaults minus tuned baselines\n")
        parts.append("Bold: below 0.05 after Holm's correction for this whole table.\n")
        lines = [["default − baseline", *list(MEASURES)[:3]]]
        strong = holm([p for *_, p in found])
        for first in range(0, len(found), 3):
            default, name = found[first][:2]
            cells = [
                f"**{each[3]}**" if ok else str(each[3])
                for each, ok in zip(
                    found[first : first + 3], strong[first:], strict=False
                )
            ]
            lines.append([f"{default} − {name}", *cells])
        parts.append(markdown(lines))
    return "\n".join(parts)


def grouped(
    file: str, by: Sequence[str], columns: Sequence[str], spread: bool = False
) -> str:
    """A table of a CSV file: means over the rest, or medians with the range."""
    table = pd.read_csv(RESULTS / file)
    lines = [[*by, *columns, "runs"]]
    for names, rows in table.groupby(list(by), sort=False):
        found = [rows[each].dropna() for each in columns]
        cells = [
            ""
            if each.empty
            else f"{each.median():.3g} ({each.min():.3g}–{each.max():.3g})"
            if spread
            else f"{each.mean():.3g}"
            for each in found
        ]
        lines.append([*map(str, names), *cells, str(len(rows))])
    return markdown(lines)


OTHERS = {
    "optimum": (
        "Problems whose optimum is known",
        "`python -m benchmarks.optimum`, means over the seeds. `above` is the objective over the "
        "optimum, minus 1; it is empty where the optimum is not known. `violated` is the share of "
        "samples, of the programs the worst inequality of an instance; `equality` the mean "
        "distance from an equality. The objective of `field` is the largest error.\n\n"
        "![Objective against violation rate](../../benchmarks/evidence/results/optimum.png)",
        lambda: grouped(
            "optimum.csv",
            ("problem", "epochs", "method", "unit"),
            ("violated", "objective", "above", "equality"),
        ),
    ),
    "constants": (
        "The constants of the rule, halved and doubled",
        "`python -m benchmarks.tasks --constants --epochs 10`: `Pointwise()`, means over three "
        "seeds. The gap is to the known optimum.",
        lambda: grouped(
            "constants.csv",
            ("task", "epochs", "constant"),
            ("violated", "size", "objective", "gap"),
        ),
    ),
    "families": (
        "Families of optimisation problems",
        "`python benchmarks/families.py`: means over the seeds; 833 instances that did not train, "
        "150 epochs, nothing tuned. `gap` is the relative distance to the optimum, `worst` the "
        "mean of an instance's worst violation, `beyond` the share above 0.001.",
        lambda: grouped(
            "families.csv",
            ("problem", "method", "correction"),
            ("objective", "gap", "worst", "beyond", "equality"),
        ),
    ),
    "rivals": (
        "Rivals' own programs on DC3's convex problems",
        "`python benchmarks/rivals.py`: means over the seeds, the same instances. DC3 has its "
        "defaults but for the epochs, neuromancer the best of ten settings by the validation "
        "instances. `seconds` are those of one processor in training, `test seconds` for 833 "
        "answers and their judgement.",
        lambda: grouped(
            "rivals.csv",
            ("method", "version", "epochs", "correction"),
            ("objective", "gap", "worst", "beyond", "seconds", "test seconds"),
        ),
    ),
    "acopf": (
        "Optimal power flow on 57 buses",
        "`python -m benchmarks.acopf`: means over the seeds, instances that did not train; `val` "
        "chooses, `test` judges. The completion holds every equality. DC3 published, on 100 "
        "instances of its own drawing: gap 0.00110, worst 0.00201, corrected.",
        lambda: grouped(
            "acopf.csv",
            ("method", "epochs", "part", "correction"),
            ("objective", "gap", "worst", "beyond", "equality"),
        ),
    ),
    "published": (
        "Tables of papers on learned solvers",
        "`python -m benchmarks.published`: means over the seeds, in the columns of each paper; "
        "`newton` is after the correction.",
        lambda: grouped(
            "published.csv", ("table", "method", "correction", "column"), ("value",)
        ),
    ),
    "corrections": (
        "Two corrections beside each other",
        "`python benchmarks/corrections.py`: the same answers, corrected by gradients and by "
        "Newton's steps. `gap` is above the optimum, `ms` of an answer.",
        lambda: grouped(
            "corrections.csv",
            ("family", "epochs", "correction"),
            ("violation, largest", "moved, mean", "gap, %", "ms"),
        ),
    ),
    "start": (
        "Where λ starts",
        "`python benchmarks/start_of_multipliers.py`: at 0, or at the mean of solved instances' "
        "multipliers.",
        lambda: grouped(
            "start.csv",
            ("family", "start", "epochs"),
            ("gap, %", "worst", "gap, %, corrected", "worst, corrected"),
        ),
    ),
    "few_instances": (
        "Few training instances",
        "`python -m benchmarks.few_instances`: means over the seeds, on 2,000 new inputs. `drawn`: "
        "the requirement at inputs that are drawn anew in every step.",
        lambda: grouped(
            "few_instances.csv",
            ("task", "method", "bound", "drawn"),
            ("violated", "violation", "objective"),
        ),
    ),
    "groups": (
        "A bound on the mean of each group",
        "`python -m benchmarks.groups`: means over the seeds. `above` is the cost over the least "
        "cost, minus 1, `short` the share of the articles below 0.9, `by` how much below the mean "
        "article is.",
        lambda: grouped(
            "groups.csv",
            ("on", "epochs", "bound"),
            ("above", "short", "by", "new short", "new by"),
        ),
    ),
    "shares": (
        "At most a share of the samples may violate",
        "`python -m benchmarks.shares`: median (range) over the seeds. `above` is the objective "
        "over the optimum, minus 1, `violated` the share of the positives below 0.",
        lambda: grouped(
            "shares.csv",
            ("positives", "share", "method", "epochs"),
            ("above", "violated"),
            spread=True,
        ),
    ),
    "two_sided": (
        "Two-sided requirements on a language model",
        "`python benchmarks/two_sided.py`: median (range) over the seeds. Settings with one run "
        "were tried on a sixth seed, by which the baselines' weights were chosen.",
        lambda: grouped(
            "two_sided.csv",
            ("method",),
            (
                "outside or lost",
                "the same beyond the grace",
                "kl",
                "forget: too little",
                "forget: too far",
                "forget: worst excess",
                "keep: lost",
                "keep: worst excess",
            ),
            spread=True,
        ),
    ),
    "keeping": (
        "Learn new answers and keep the others",
        "`python -m benchmarks.keeping`, MiniMind2-Small (26M): 24 answers to learn, 40 to keep "
        "within 0.05 nats per token, 60 other prompts. `beyond` is the share of "
        "answers beyond the budget, `worst` how far the worst one is. Tuning has one seed and 40 "
        "other prompts; the judged settings are those chosen by it, and the untuned ones.",
        lambda: grouped(
            "keeping.csv",
            ("part", "epochs", "method"),
            (
                "learnt",
                "beyond, kept",
                "worst, kept",
                "KL, kept",
                "beyond, others",
                "worst, others",
                "KL, others",
                "flipped, kept",
            ),
        ),
    ),
    "keep_tolerances": (
        "Three bounds of a KL",
        "`python -m benchmarks.kept_answers keep_tolerances`, MiniMind2-Small (26M): the recipe "
        "`keep` on its example; `method` is the bound.",
        lambda: grouped(
            "keep_tolerances.csv",
            ("method",),
            ("train/keep/violated", "train/kl", "train/nll", "train/flipped"),
        ),
    ),
    "keep_wording": (
        "A model's own answers, word for word",
        "`python -m benchmarks.kept_answers keep_wording`, SmolLM2-135M: 24 answers to learn, 42 "
        "of its own to keep, 14 others. Flipped: answers that are other texts than before.",
        lambda: grouped(
            "keep_wording.csv",
            ("method",),
            (
                "train/exact_answers",
                "train/flipped",
                "test/flipped",
                "train/keep/violated",
            ),
        ),
    ),
    "bounds": (
        "Proofs of answers",
        "`python benchmarks/bounds.py`: DC3's convex problems, 833 unseen instances; medians "
        "(range) over the seeds. Gaps are shares of the optimum.",
        lambda: grouped(
            "bounds.csv",
            ("answer", "dtype"),
            ("violation", "proved, mean", "proved, largest", "true, mean", "ms"),
            spread=True,
        ),
    ),
    "verdicts": (
        "How often a verdict is wrong, and an alarm false",
        "`python benchmarks/verdicts.py`: the share of 2,000 draws that end in a yes, of `check` "
        "or, with ten candidates, of `compare --require`. In the cases called wrong one "
        "requirement is exactly at its bound, and at most 0.05 may.",
        lambda: (
            grouped(
                "verdicts.csv",
                ("case", "inputs"),
                ("pl-pointwise", "paired bootstrap", "bare numbers"),
            )
            + "\n## Alarms of a monitor\n\n`python benchmarks/monitoring.py`: the share of 2,000 "
            "streams with an alarm within so many looks, each at 20 new samples. Where no more are "
            "violated than required, it is false, and at most 0.05 may end in one. MAPIE's "
            "RiskMonitoring has the same error, at any look.\n\n"
            + grouped(
                "monitoring.csv",
                ("required", "violated", "looks"),
                ("monitor", "MAPIE", "a test in every look"),
            )
            + "\n## Samples until an alarm\n\n`python benchmarks/monitoring.py --delay`: 200 "
            "streams of samples that are good, then of those that are not, 20,000 at most, a look "
            "every 50. The share with an alarm after the change, and after how many samples "
            "half of them have one, and 95 %; the power of one exact test of all 20,000.\n\n"
            + grouped(
                "monitoring-delay.csv",
                ("required", "good samples", "violated", "then"),
                (
                    *("monitor sees", "monitor median", "monitor 95 %"),
                    *(
                        "MAPIE sees",
                        "MAPIE median",
                        "MAPIE 95 %",
                        "exact test at the end",
                    ),
                ),
            )
        ),
    ),
}
"""Name of the page: title, introduction, tables."""


def pages() -> dict[str, str]:
    """The pages of the appendix by name. No table of contents of the site has them."""
    found = {f"{name}.md": page_of_a_study(study_of(name)) for name in STUDIES}
    for name, (title, introduction, tables) in OTHERS.items():
        found[f"{name}.md"] = f"# {title}\n\n{introduction}\n\n{tables()}"
    return {name: f"---\norphan: true\n---\n\n{text}" for name, text in found.items()}


def write_pages(folder: Path) -> None:
    """Write the appendix; pages that have no CSV file any more go."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def study_of(name: str) -> Study:
    """What the results need of a study: its titles, measures and grid."""
    return Study(
        name, yaml.safe_load(STUDIES[name].read_text("utf-8")), None, None, Path()
    )


NAMES = {"as it is": "untrained"}
"""What the pages call a method that the CSV files name otherwise."""


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; the first line is the header."""
    named = [
        [NAMES.get(cell, cell).replace("|", "/") for cell in line] for line in lines
    ]
    ruled = [named[0], ["---"] * len(named[0]), *named[1:]]
    rows = ("| " + " | ".join(line) + " |" for line in ruled)
    return "\n".join(rows) + "\n"


def hardest(found: Sequence[Compared]) -> list[Compared]:
    """Of each method's settings the one that violates least on new inputs, in the mean."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for study, _, baseline, measure, difference, _ in found:
        if measure == "violated, new":
            method = (
                study.title,
                re.split(r", (?:weight|level|tilt|epsilon|dual_lr)=", baseline)[0],
            )
            best[method] = max(
                best.get(method, (-np.inf, "")), (difference.mean, baseline)
            )
    shown = {(title, baseline) for (title, _), (_, baseline) in best.items()}
    return [each for each in found if (each[0].title, each[2]) in shown]


def draw_figures() -> None:
    # scikit-learn: --tables needs it not.
    from benchmarks.optimum.show import draw as draw_optima

    corpus = study_of("reranker-corpus")
    settings = {name: of[0] for name, of in reached(corpus, "tune").items()}
    reads = [corpus.value(*MEASURES[each]) for each in list(MEASURES)[:3]]
    weights({name: [read(of) for read in reads] for name, of in settings.items()}, DOCS)
    optima = pd.read_csv(RESULTS / "optimum.csv")
    # Of these no hinge was tried.
    compared = ~optima["problem"].str.endswith("in the loss")
    draw_optima(optima[compared], RESULTS / "optimum.png")
    found = [
        (study_of(name), *each)
        for name in FIGURE
        for each in differences(study_of(name))
    ]
    strong = holm([each[-1] for each in found])
    forest(
        hardest(
            [(*each[:-1], bool(ok)) for each, ok in zip(found, strong, strict=True)]
        ),
        DOCS,
    )
    print(f"{len(found)} differences, {np.sum(strong)} remain after Holm's correction")


def main() -> None:
    write_pages(DOCS / "appendix")
    if "--tables" not in sys.argv[1:]:
        draw_figures()


if __name__ == "__main__":
    main()
