"""The tables of the pages say what the stored runs say, to the last digit that is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from scipy.stats import t

from benchmarks.families import RESULTS
from benchmarks.optimum.show import means
from benchmarks.published.__main__ import TABLES
from benchmarks.published.show import LABELS
from benchmarks.tasks.constants import compared

DOCS = Path(__file__).parents[2] / "docs"
PROBLEMS = {
    "margins of two digits": "margins",
    "new digits, old ones kept": "retention",
    "new digits within a KL budget": "budget",
    "a table of 60 samples": "table, 60",
    "DC3's programs, new ones": "programs",
    "the same, equalities in the loss": "programs, equalities",
    "band, 2,000 samples": "band 2000",
    "band, 20,000": "band 20000",
}


def rows(page: str, head: str) -> Iterator[list[str]]:
    """The cells of each row of the table whose head begins so."""
    lines = (
        (DOCS / page).read_text(encoding="utf-8").partition(head)[2].split("\n\n")[0]
    )
    for line in lines.splitlines()[2:]:
        yield [cell.strip(" *`") for cell in line.strip("|").split("|")]


def is_shown(text: str, *exact: float) -> bool:
    """Whether a cell shows these numbers, in its own digits; of "–" nothing is asked."""
    found = re.findall(r"−?[\d.]+", text.replace(",", ""))
    digits = [len(number.partition(".")[2]) for number in found]
    shown = [float(number.replace("−", "-")) for number in found]
    return text == "–" or (
        len(shown) == len(exact)
        and all(
            abs(s - e) <= 0.5001 * 0.1**d
            for s, e, d in zip(shown, exact, digits, strict=True)
        )
    )


def test_the_known_optima() -> None:
    table = means(pd.read_csv(RESULTS / "optimum.csv")).set_index(
        ["problem", "epochs", "method"]
    )
    listed, problem = list(rows("evidence.md", "| problem | epochs |")), ""
    for name, epochs, ours, hinge in listed:
        label = next((each for each in PROBLEMS if name.startswith(each)), None)
        problem = PROBLEMS[label] if label else problem
        weight, _, theirs = hinge.partition(": ")
        for method, cell in (
            ("Pointwise()", ours),
            (f"hinge {weight.replace(',', '')}", theirs),
        ):
            of = table.loc[problem, int(epochs), method]
            second = 100 * of["above"] if "%" in cell else of["objective"]
            assert is_shown(cell, of["violated"], second), (problem, epochs, method, of)
    assert len(listed) == 12


def test_a_kl_budget_beside_its_rivals() -> None:
    runs = pd.read_csv(RESULTS / "keeping.csv").query(
        "part == 'judged' and epochs == 12"
    )
    table = runs.groupby("method").mean(numeric_only=True)
    names = {"before": "as it is", "plain fine-tuning": "fine-tuning"}
    columns = ["learnt", "beyond, kept", "worst, kept", "flipped, kept"]
    listed = list(rows("keep.md", "| method | learnt"))
    for name, *cells in listed:
        of = table.loc[names.get(name, name), columns]
        assert all(map(is_shown, cells, of)), (name, cells, of)
    assert len(listed) == 10


def test_constants_halved_and_doubled() -> None:
    lines = compared(pd.read_csv(RESULTS / "constants.csv")).splitlines()[2:14]
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
    found = {name: counts for name, *counts in cells}
    listed = list(rows("../benchmarks/README.md", "| | ahead | behind |"))
    for names, ahead, behind in listed:
        name, _, values = names.partition(" ")
        for value, *counts in zip(
            *(each.split("; ") for each in (values, ahead, behind)), strict=True
        ):
            assert found.pop(f"{name}={value}") == counts, (name, value)
    assert not found


def test_a_kl_budget_at_the_length_of_the_recipe() -> None:
    runs = pd.read_csv(RESULTS / "keeping.csv").query("epochs == 30")
    text = (DOCS / "keep.md").read_text("utf-8")
    assert not runs["beyond, kept"].any()
    for _, of in runs.iterrows():
        assert f"{of['learnt']:.3f} (" in text, of["method"]
        assert f"({of['method']})" in text or f"(`{of['method']}`)" in text
    assert len(runs) == 3


def test_two_sided_requirements() -> None:
    runs = pd.read_csv(RESULTS / "two_sided.csv").query("seed < 100")
    table = runs.groupby("method").median(numeric_only=True)
    for name, missed, kl in rows("evidence.md", "| method | missed"):
        of = table.loc[name.partition(",")[0].strip("`")]
        assert is_shown(missed, of["outside or lost"])
        assert is_shown(kl, of["kl"])


def test_families_of_problems() -> None:
    rivals = pd.read_csv(RESULTS / "rivals.csv")
    runs = [
        pd.read_csv(RESULTS / "families.csv"),
        rivals.query("method != 'Pointwise()'"),
    ]
    table = pd.concat(runs).groupby(["problem", "method", "correction"])
    exact, method = table[["gap", "worst"]].mean(), ""
    for name, *cells in rows("family.md", "| method | convex"):
        head, _, unit = name.partition(", constraints")
        steps, name = 100 * head.endswith("corrected"), head.strip("`")
        method = method if name.startswith(("the same", "corrected")) else name
        base = {"cooper, indexed multipliers": "cooper"} if unit else {}
        of = base.get(method, method) + (f", violations{unit}" if unit else "")
        for problem, cell in zip(
            ("convex", "nonconvex", "equalities in the loss"), cells, strict=False
        ):
            if cell and "published" not in method:
                gap, worst = exact.loc[problem, of, steps]
                assert is_shown(cell, 100 * gap, worst), (problem, of, cell)


SETTINGS = {
    "untrained": ("as it is", ""),
    "Pointwise()": ("Pointwise(), untuned", ""),
    "Relaxed(price=10)": ("Relaxed(price=10), untuned", ""),
    "hinge 0.3, aim at −0.3 and −3": (
        "penalty hinge, aim inside",
        "weight=0.3, refuse=-0.3",
    ),
    "hinge 1, aim at 3.5": ("penalty hinge, aim inside", "weight=1, epsilon=3.5"),
    "hinge 3, aim at 4.5": ("penalty hinge, aim inside", "weight=3, epsilon=4.5"),
    "hinge 1, aim at −1.5 and −7": (
        "penalty hinge, aim inside",
        "weight=1, chosen=-1.5",
    ),
    "hinge 0.3, aimed inside the bound": (
        "penalty hinge, aim inside",
        "weight=0.3, refuse=-0.3",
    ),
    "CVaR, level 0.5": ("CVaR", "level=0.5"),
    "tilted 3": ("tilted", "tilt=3"),
    "average": ("average", "dual_lr=0.03"),
    "average constraint": ("average", "dual_lr=0.03"),
}
"""Of a row its method, and what its setting begins with; "KIND N" is the penalty of that weight."""


def judged(study: str, name: str) -> pd.DataFrame:
    """The five runs behind a row."""
    runs = (
        pd.read_csv(RESULTS / f"{study}.csv")
        .query("part == 'test'")
        .fillna({"setting": ""})
    )
    kind, _, weight = name.rpartition(" ")
    method, setting = SETTINGS.get(name, (f"penalty {kind}", f"weight={weight}"))
    if study.startswith("reranker") and method == "average":
        setting = "epsilon=3, dual_lr=0.1"
    own = runs["setting"].map(
        lambda text: f"{text},".startswith(f"{setting}," if setting else "")
    )
    found = runs[(runs["method"] == method) & own]
    assert len(found) == 5, (study, name, len(found))
    return found


def test_safety_and_re_ranking() -> None:
    """Means ± half a 95 % interval of Student's t."""
    pages = {
        "safety": ("| safety | violated", ("refuse", "comply"), "kl"),
        "reranker-corpus": (
            "| re-ranking | violated",
            ("relevance",),
            "length_objective",
        ),
    }
    for study, (head, names, objective) in pages.items():
        listed = list(rows("evidence.md", head))
        assert len(listed) >= 8
        for name, *cells in listed:
            of = judged(study, name)
            columns = [
                of[[f"{part}/{each}/violated" for each in names]].mean(axis=1)
                for part in ("train", "held-out")
            ]
            if study == "reranker-corpus":
                columns += [of["held-out/mrr@10"], of["held-out/wrong_order"]]
            for cell, values in zip(
                cells, [*columns, of[f"held-out/{objective}"]], strict=True
            ):
                half = t.ppf(0.975, 4) * values.std() / 5**0.5
                mean, _, bound = cell.partition(" ± ")
                assert is_shown(mean, values.mean()), (study, name, cell, values.mean())
                assert is_shown(bound or "–", half), (study, name, cell, half)


def test_when2call() -> None:
    columns = "train/chosen/violated train/rejected/violated held-out/chosen/violated held-out/kl"
    listed = list(rows("evidence.md", "| When2Call | chosen"))
    for name, *cells in listed:
        of = judged("when2call", name).mean(numeric_only=True)
        for cell, column in zip(cells, columns.split(), strict=True):
            assert is_shown(cell, of[column]), (name, cell, column, of[column])
    assert len(listed) == 6


def test_the_table_of_the_readme() -> None:
    listed = list(rows("../README.md", "| method | trainings | training: refuse"))
    for name, _, *cells in listed:
        of = judged("safety", name).mean(numeric_only=True)
        exact = [
            of[f"{p}/{n}/violated"]
            for p in ("train", "held-out")
            for n in ("refuse", "comply")
        ]
        exact.append(of["held-out/kl"])
        assert all(map(is_shown, cells, exact)), (name, cells, exact)
        assert len(cells) == len(exact)
    assert len(listed) == 5


def test_the_seconds_and_epochs_of_rivals() -> None:
    of = pd.read_csv(RESULTS / "rivals.csv").groupby("method").mean(numeric_only=True)
    seconds = of["seconds"]
    said = "trains faster: (.*) s against (.*). DC3 had (.*) of 1,000\nepochs .(.*) s.. FSNet"
    found = re.search(said, (DOCS / "family.md").read_text(encoding="utf-8"))
    assert found
    ours, theirs = seconds["Pointwise()"], seconds["neuromancer"]
    exact = (theirs, ours, of.loc["DC3", "epochs"], seconds["DC3"])
    assert all(map(is_shown, found.groups(), exact)), (found.groups(), exact)


def test_published_tables() -> None:
    """Each row is a mean of the stored runs, or what the file that it names says."""
    runs = pd.read_csv(RESULTS / "published.csv")
    listed = 0
    for table in TABLES.values():
        own = runs[runs["table"] == table.name]
        means = own.groupby(["method", "correction", "column"])["value"].mean()
        shown = list(rows("family.md", f"| {table.name} | {table.shown[0]} |"))
        for name, *cells, seeds, source in shown:
            listed += 1
            if name.endswith(", published"):
                values = table.published[name.removesuffix(", published")]
                exact = [values.get(column) for column in table.shown]
                assert source == table.file, (name, source)
            else:
                method, _, state = name.partition("`, " if "`" in name else ", ")
                correction = {label: key for key, label in LABELS.items()}[state]
                of = means.loc[method.strip("`"), correction]
                exact = [of[column] for column in table.shown]
                count = own[own["method"] == method.strip("`")]["seed"].nunique()
                assert (int(seeds), source) == (count, "published.csv"), name
            for cell, value in zip(cells, exact, strict=True):
                assert (cell == "") == (value is None), (table.name, name)
                if value is not None:
                    assert near(cell, value), (table.name, name, cell, value)
    assert listed >= 30


def near(cell: str, value: float) -> bool:
    """Whether a cell has the number to the three digits that it shows."""
    return abs(float(cell.replace("−", "-")) - value) <= 0.0051 * abs(value)


def test_corrections_beside_each_other() -> None:
    table = pd.read_csv(RESULTS / "corrections.csv").query("epochs != 5")
    table = table.set_index(["family", "correction"])
    listed, family = 0, ""
    for name, correction, violation, gap, cost in rows(
        "family.md", "| constraints | corr"
    ):
        family = name or family
        of = table.loc[family, correction]
        listed += 1
        assert near(violation, of["violation, largest"]) or violation == "0"
        assert gap == "" or near(gap, of["gap, %"])
        assert near(cost, of["ms"])
    assert listed >= 6


def test_starts_of_multipliers() -> None:
    table = pd.read_csv(RESULTS / "start.csv", dtype={"start": str})
    table["family"] = table["family"].replace(
        {"convex": "DC3 convex", "sine": "DC3 sine"}
    )
    of = table.set_index(["family", "epochs", "start"])["gap, %, corrected"]
    listed = list(rows("family.md", "| family, epochs | 0"))
    for name, *cells in listed:
        family, _, epochs = name.rpartition(", ")
        for start, cell in zip(("0", "mean", "own"), cells, strict=True):
            key = (family, int(epochs), start)
            assert (cell == "") == (key not in of.index), key
            assert cell == "" or is_shown(cell, of[key]), (key, of[key])
    assert len(listed) == 3


def test_bounds_on_the_means_of_groups() -> None:
    """Means of three seeds."""
    runs = pd.read_csv(RESULTS / "groups.csv").query("on != 'mean, in pieces'")
    table = runs.groupby(["epochs", "bound", "on"]).mean(numeric_only=True)
    columns = ["short", "by", "new short", "new by"]
    listed = list(rows("formulations.md", "| epochs | cost above the optimum"))
    for name, above, *cells in listed:
        epochs, _, setting = name.partition(", ")
        bound = float(setting.rpartition(" ")[2]) if "bound" in setting else 0.9
        on = "each day" if "each_sample" in setting else "mean"
        of = table.loc[int(epochs), bound, on]
        assert is_shown(above, 100 * of["above"]), (name, above)
        for cell, column in zip(cells, columns, strict=True):
            assert is_shown(cell, of[column]), (name, column, cell)
            assert cell != "0" or of[column] == 0, (name, column)
    assert len(listed) == len(table)
    assert runs["seed"].nunique() == 3


def test_few_training_instances() -> None:
    """Of each task all methods, on fixed and on drawn inputs."""
    runs = pd.read_csv(RESULTS / "few_instances.csv")
    keys, columns = ["method", "bound"], ["violated", "violation", "objective"]
    for task, of_task in runs.groupby("task"):
        by = [of_task[of_task["drawn"] == drawn] for drawn in (False, True)]
        means = [part.groupby(keys, sort=False)[columns].mean() for part in by]
        listed = list(rows("few_instances.md", f"| {task} | fixed inputs"))
        assert len(listed) == len(means[0]) == 11
        for place, (name, *cells) in enumerate(listed):
            for cell, table in zip(cells, means, strict=True):
                exact = table.iloc[place]
                assert is_shown(cell, *exact), (name, cell, exact)
                assert ("0 · 0 ·" in cell) == (exact["violation"] == 0)
                assert name.startswith("the same") or exact.name[0] == name


def test_at_most_a_share() -> None:
    """Medians of three seeds, and in brackets the largest."""
    runs = pd.read_csv(RESULTS / "shares.csv")
    runs = runs.query("method == 'Pointwise()' and epochs == 100")
    listed = list(rows("formulations.md", "| positives | share .05"))
    for name, *cells in listed:
        for cell, share in zip(cells, (0.05, 0.2), strict=True):
            of = runs[(runs["positives"] == name) & (runs["share"] == share)]
            above, violated = 100 * of["above"], of["violated"]
            exact = [above.median(), above.max(), violated.median(), violated.max()]
            assert len(of) == 3
            assert is_shown(cell, *exact), (name, cell, exact)
    assert len(listed) == runs["positives"].nunique()
    page = (DOCS / "formulations.md").read_text(encoding="utf-8")
    assert "After 100 it is met in every run." in page
    assert (runs["violated"] <= runs["share"]).all()
