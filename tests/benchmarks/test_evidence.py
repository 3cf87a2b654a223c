"""The evidence's own logic: parts, grids, the choice under a budget, intervals, what is not run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks.evidence import appendix
from benchmarks.evidence.__main__ import main as evidence
from benchmarks.evidence.choice import Measured, budgets, choose
from benchmarks.evidence.grids import Entry, read_grid
from benchmarks.evidence.report import write_report
from benchmarks.evidence.results import RESULTS, read_results, write_results
from benchmarks.evidence.splits import Sizes, split
from benchmarks.evidence.stages import choices_of, to_judge, write_choices
from benchmarks.evidence.statistics import estimate, holm, p_value, paired_difference
from benchmarks.evidence.study import STUDIES, load
from benchmarks.evidence.workers import run_all
from pl_pointwise.compare.runs import VIOLATIONS, Comparison, Run
from pl_pointwise.identity.files import digest_now

NAN = float("nan")


def run(
    method: str, setting: str, objective: float, cvar95: float, violated: float = 0.5
) -> Measured:
    role: Any = "ours" if method == "pointwise" else "rival"
    return Measured(Entry(method, setting, role, []), 0, objective, cvar95, violated)


# The choice ---------------------------------------------------------------------------------------


def test_the_budget_weighs_methods_alike_and_takes_diverged_settings_as_worst() -> None:
    many = [run("pointwise", f"a={i}", 1.0, 0.0) for i in range(30)]
    few = [run("penalty", "w=1", 2.0, 0.0), run("penalty", "w=2", 3.0, 0.0)]
    found = budgets([*many, *few], [0.25, 0.5, 0.51, 0.75, 1.0])
    assert found == {0.25: 1.0, 0.5: 1.0, 0.51: 2.0, 0.75: 2.0, 1.0: 3.0}
    runs = [
        run("a", str(i), value, 0.0) for i, value in enumerate([3.0, NAN, 1.0, 2.0])
    ]
    for order in (runs, runs[::-1]):
        assert budgets(order, [0.5, 0.75]) == {0.5: 2.0, 0.75: 3.0}


def test_the_shortest_tail_within_the_budget_is_chosen() -> None:
    runs = [
        run("pointwise", "a=1", 1.0, 5.0),
        run("pointwise", "a=2", 2.0, 4.0),
        # the best tail, at a price that is not allowed
        run("pointwise", "a=3", 9.0, 0.0),
        run("penalty", "w=1", 2.0, 7.0),
        run("penalty", "w=2", 8.0, 1.0),
        run("penalty", "w=3", 1.0, NAN),
        run("penalty", "w=4", NAN, 0.0),
    ]
    found = choose(runs, [0.5])
    assert {c.budget for c in found} == {2.0}
    assert [c.validation.entry.name for c in found] == [
        "pointwise, a=2",
        "penalty, w=1",
    ]


def test_each_criterion_chooses_by_its_own_statistic_and_breaks_ties_by_the_other() -> (
    None
):
    runs = [
        run("a", "tail", 1.0, 1.0, 0.9),
        run("a", "share", 1.0, 3.0, 0.1),
        run("a", "tie", 1.0, 1.0, 0.8),
    ]
    found = choose(runs, [1.0], ("cvar95", "violated"))
    chosen = {c.criterion: c.validation.entry.setting for c in found}
    assert chosen == {"cvar95": "tie", "violated": "share"}


@pytest.mark.parametrize("take", ["best", "every method"])
def test_a_task_takes_over_the_choices_of_another(take: str, tmp_path: Path) -> None:
    """Of the quantile it names; the best of ours and of the rivals by each criterion, or all."""
    other = load("reranker-corpus", None, None, tmp_path)
    runs = [
        run("pointwise", "a", 1.0, 1.0),
        run("b", "x", 1.0, 3.0, 0.1),
        run("c", "x", 1.0, 2.0),
    ]
    chosen = choose(runs, [0.25, 0.5], ["cvar95", "violated"])
    write_choices(other, chosen)
    task = load("reranker-msmarco", None, None, tmp_path)
    found = choices_of(replace(task, described={**task.described, "take": take}))
    assert {choice.quantile for choice in found} == {0.5}
    taken = [(choice.criterion, choice.validation.entry.method) for choice in found]
    rivals = {"best": {"cvar95": ["c"], "violated": ["b"]}}.get(take, {})
    expected = [
        (criterion, method)
        for criterion in ("cvar95", "violated")
        for method in ["pointwise", *rivals.get(criterion, ["b", "c"])]
    ]
    assert taken == expected


# Means and differences ----------------------------------------------------------------------------


def test_the_interval_is_that_of_students_t() -> None:
    values = [1.0, 2.0, 4.0, 4.5, 7.0]
    found = estimate(values)
    half = stats.t.ppf(0.975, 4) * np.std(values, ddof=1) / np.sqrt(5)
    assert found.mean == pytest.approx(3.7)
    assert (found.low, found.high) == pytest.approx((3.7 - half, 3.7 + half))
    assert found.seeds == 5


def test_the_paired_difference_is_of_the_seeds_that_both_have() -> None:
    generator = np.random.default_rng(0)
    # what the seed does to both: far above the difference
    shared = 10 * generator.normal(size=6)
    first = {seed: shared[seed] for seed in range(6)}
    second = {seed: shared[seed] + 1 + 0.1 * generator.normal() for seed in range(1, 6)}
    found = paired_difference(first, second)
    pairs = [[each[seed] for seed in range(1, 6)] for each in (first, second)]
    expected = stats.ttest_rel(*pairs).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.seeds == 5
    # the interval excludes zero, as that of unpaired means would not
    assert found.sign == -1
    assert stats.ttest_ind(*pairs).pvalue > 0.05
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


# Records ------------------------------------------------------------------------------------------


def test_no_group_is_in_two_parts_and_the_test_part_is_the_same_for_every_seed() -> (
    None
):
    sizes = Sizes(train=12, validation=9, test=10, per_group=3)
    records = [
        (f"g{g}", {"group": g, "number": n}) for g in range(20) for n in range(5)
    ]
    found = [split(records, sizes, seed) for seed in range(4)]
    for parts in found:
        assert [len(parts[name]) for name in ("train", "validation", "test")] == [
            12,
            9,
            10,
        ]
        train, validation, test = (
            {row["group"] for row in parts[name]}
            for name in ("train", "validation", "test")
        )
        assert not train & validation
        assert not (train | validation) & test
        assert parts["test"] == found[0]["test"]
        assert max(sum(r["group"] == g for r in parts["train"]) for g in train) <= 3
    assert found[0]["train"] != found[1]["train"]
    assert split(records, sizes, 2) == found[2]


# Grids and tasks ----------------------------------------------------------------------------------


def test_a_setting_goes_to_its_path_over_the_overlay(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(
        "paths: {margin: model.init_args.tolerance}\n"
        "methods: {a: {role: ours, overlay: reranker/pointwise, settings: [{alpha: 2, margin: 4}]}}"
    )
    (entry,) = read_grid(tmp_path / "grid.yaml")
    formulation = {"init_args": {"alpha": 2}}
    arguments = {"formulation": formulation, "tolerance": 4}
    assert entry.overlay == ["reranker/pointwise", {"model": {"init_args": arguments}}]
    assert entry.name == "a, alpha=2, margin=4"


def test_the_corpus_is_split_into_files_that_the_runs_name(tmp_path: Path) -> None:
    (tmp_path / "models" / "bert-mini-crossencoder").mkdir(parents=True)
    found = load("reranker-corpus", None, tmp_path / "models", tmp_path)
    entries = found.entries()
    tuned = found.runs(entries, "tune", 0)
    judged = found.runs(entries[:2], "judge", 3)
    assert len(tuned) == len(entries)
    assert "queries-validation.jsonl" in " ".join(tuned[0].run.arguments)
    assert "queries-test.jsonl" in " ".join(judged[0].run.arguments)
    assert "seed-3/queries-train.jsonl" in " ".join(judged[0].run.arguments)
    assert "queries-test.jsonl" not in " ".join(tuned[0].run.arguments)
    assert found.runs(entries, "tune", 0)[5].run.digest == tuned[5].run.digest


# Running ------------------------------------------------------------------------------------------


class Stub:
    """Stands for a fit: writes what a finished run leaves, and remembers what it ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, each: Run) -> None:
        self.ran.append(each.title)
        each.folder.mkdir(parents=True, exist_ok=True)
        np.savez(each.folder / VIOLATIONS)
        metrics = {"test/kl": 2.0}
        metrics |= {
            f"test/{c}/{s}": v for c, v in (("x", 1.0), ("y", 3.0)) for s in STATISTICS
        }
        wrote = {VIOLATIONS: digest_now(each.folder / VIOLATIONS)}
        result = {"digest": each.digest, "metrics": metrics, "wrote": wrote}
        (each.folder / "result.json").write_text(json.dumps(result))


STATISTICS = ("cvar95", "violated")


def runs_in(folder: Path, methods: str = "a: {}\nb: {}\nc: {}") -> list[Run]:
    (folder / "base.yaml").write_text("x: 1")
    (folder / "methods.yaml").write_text(methods)
    base, names = str(folder / "base.yaml"), str(folder / "methods.yaml")
    return Comparison([base], folder / "out", names, [0]).runs


def test_what_is_finished_is_not_run_again_and_what_changed_is(tmp_path: Path) -> None:
    stub = Stub()
    assert run_all(runs_in(tmp_path)[:2], 1, execute=stub)
    assert run_all(runs_in(tmp_path), 1, execute=stub)
    assert stub.ran == ["a · seed 0", "b · seed 0", "c · seed 0"]
    assert run_all(runs_in(tmp_path, "a: {}\nb: {y: 2}\nc: {}"), 1, execute=stub)
    assert stub.ran[3:] == ["b · seed 0"]


# Results that are published -----------------------------------------------------------------------


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """To the last digit of a float32, and a metric that is not a number stays one."""
    exact = float(np.float32(0.1234567))
    first = {"fit_seconds": 1.0, "metrics": {"test/kl": exact, "train/kl": 2.0}}
    second = {"fit_seconds": 2.5, "metrics": {"test/kl": NAN, "test/x/cvar95": -3.0}}
    path = tmp_path / "x.csv"
    write_results([("tune", "a", "b=1", 0, first), ("judge", "c", "", 4, second)], path)
    found = read_results(path)
    metrics = found["tune", "a, b=1", 0]["metrics"]
    assert {name: np.float32(value) for name, value in metrics.items()} == {
        "test/kl": np.float32(exact),
        "train/kl": 2.0,
    }
    assert np.isnan(found["judge", "c", 4]["metrics"].pop("test/kl"))
    assert found["judge", "c", 4] == {
        "fit_seconds": 2.5,
        "metrics": {"test/x/cvar95": -3.0},
    }
    assert len(found) == 2
    assert read_results(tmp_path / "none.csv") == {}


def test_what_is_published_is_not_run_and_its_seeds_join_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further seed, and settings that are not published, are all that is run."""
    (tmp_path / "models" / "bert-mini-crossencoder").mkdir(parents=True)
    ran: list[str] = []
    monkeypatch.setattr(
        "benchmarks.evidence.__main__.run_all",
        lambda runs, *rest: (
            ran.extend(run.title for run in runs if "judge" in run.folder.parts) or True
        ),
    )
    monkeypatch.setattr("benchmarks.evidence.report.RESULTS", tmp_path / "written")
    published = read_results(CORPUS)
    seeds = sorted({seed for stage, _, seed in published if stage == "judge"})[:1]
    words = [
        "--task",
        "reranker-corpus",
        "--models",
        str(tmp_path / "models"),
        "--published",
    ]
    words += ["--output", str(tmp_path), "--seeds"]
    evidence([*words, *map(str, seeds), "99"])
    assert ran
    judged = {
        f"{name} · seed {seed}" for stage, name, seed in published if stage == "judge"
    }
    assert not judged.intersection(ran)
    assert any(title.endswith("seed 99") for title in ran)


CORPUS = RESULTS / "reranker-corpus.csv"


@pytest.mark.parametrize("name", STUDIES)
def test_the_published_results_are_of_the_settings_that_stand_in_the_grid(
    name: str, tmp_path: Path
) -> None:
    """They are known by these names, so that a changed grid leaves none that means another run.

    But those of the rule before ``Pointwise()`` took the gradients' unit, which had more arguments.
    """
    published = read_results(RESULTS / f"{name}.csv")
    if not published:
        pytest.skip("nothing is published of it")
    task = load(name, None, None, tmp_path)
    tuned = {p[1] for p in published if p[0] == "tune" and "alpha_growth" not in p[1]}
    known = set() if task.settings_of else {entry.name for entry in task.entries()}
    assert tuned <= known
    assert all("alpha" in name or "untuned" in name for name in known - tuned)


def test_the_report_has_a_line_for_every_finished_run(tmp_path: Path) -> None:
    """Of what the runs left: references, one of ours, a baseline, two seeds."""
    (tmp_path / "models" / "bert-mini-crossencoder").mkdir(parents=True)
    task = load("reranker-corpus", None, tmp_path / "models", tmp_path, quick=True)
    entries = {entry.method: entry for entry in task.entries()}
    found = [Measured(entries[m], 0, 1.0, 2.0, 0.5) for m in ("pointwise", "average")]
    write_choices(task, choose(found, [0.5]))
    for seed in (0, 1):
        for planned in task.runs(to_judge(task), "judge", seed):
            Stub()(planned.run)
            path = planned.run.folder / "result.json"
            path.write_text(
                json.dumps({**json.loads(path.read_text()), "fit_seconds": 1.0})
            )
    written = write_report(task, [0, 1])
    assert written.parent == task.output  # a quick run reaches no committed file
    lines = written.read_text().splitlines()
    assert len(lines) == 1 + 2 * 7  # Two chosen, and what has nothing to tune.
    assert str(tmp_path) not in written.read_text()


# The appendix -------------------------------------------------------------------------------------


def test_the_appendix_has_a_page_with_tables_for_what_the_documentation_links(
    tmp_path,
) -> None:
    """`make docs` writes it, and leads links to CSV files there."""
    (tmp_path / "gone.md").touch()
    appendix.write_pages(tmp_path)
    linked = "".join(page.read_text() for page in sorted(appendix.DOCS.glob("*.md")))
    elsewhere = {"recipes", "monitoring", "monitoring-delay"}
    names = {*re.findall(r"evidence/results/([\w-]+)\.csv\)", linked)} - elsewhere
    assert len(names) > 6
    assert {path.stem for path in tmp_path.iterdir()} >= names
    assert not (tmp_path / "gone.md").exists()
    for path in tmp_path.iterdir():
        start, title, *rest = path.read_text().removeprefix("---\n").split("\n\n")
        assert start == "orphan: true\n---"
        assert title.startswith("# ")
        assert (
            sum(line.startswith("| ") for part in rest for line in part.splitlines())
            > 3
        )


def test_differences_of_the_appendix_are_those_of_the_runs() -> None:
    safety = appendix.study_of("safety")
    rows = pd.read_csv(RESULTS / "safety.csv").query("part == 'test'").set_index("seed")
    both = [
        rows[rows.method == "Pointwise(), untuned"],
        rows[rows.setting == "weight=3"],
    ]
    first, second = both[0], both[1][both[1].method == "penalty hinge"]
    found = {each[:3]: each[3:] for each in appendix.differences(safety)}
    for measure, columns in {
        "objective": ["held-out/kl"],
        "violated, new": ["held-out/refuse/violated", "held-out/comply/violated"],
        "violated, training": ["train/refuse/violated", "train/comply/violated"],
    }.items():
        expected = stats.ttest_rel(
            *(rows[columns].mean(axis=1) for rows in (first, second))
        )
        difference, p = found[
            "Pointwise(), untuned", "penalty hinge, weight=3", measure
        ]
        assert p == pytest.approx(expected.pvalue)
        assert difference.low == pytest.approx(expected.confidence_interval(0.95).low)


def test_holm_rejects_as_by_hand() -> None:
    """0.05 / 3 and 0.05 / 2 are passed; then all that follow are kept."""
    assert [*holm([0.04, 0.001, 0.02])] == [True, True, True]
    assert [*holm([0.001, 0.03, 0.04])] == [True, False, False]
    assert p_value({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}) == 1
