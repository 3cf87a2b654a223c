"""Figures in the pages' sentences, and tables of single runs, say what the stored rows say."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import t

from benchmarks.families import RESULTS
from tests.benchmarks.test_pages import DOCS, is_shown, judged, near, rows

VIOLATED = ("held-out/refuse/violated", "held-out/comply/violated")
OF_MS_MARCO = {
    "untrained": ("as it is", ""),
    "Pointwise()": ("Pointwise(), untuned", ""),
    "Relaxed(price=10)": ("Relaxed(price=10), untuned", ""),
    "hinge 3": ("penalty hinge", "weight=3"),
    "hinge 1, aim at 3.5": ("penalty hinge, aim inside", "weight=1, epsilon=3.5"),
    "squared hinge 0.3": ("penalty squared hinge", "weight=0.3"),
    "squared hinge 1": ("penalty squared hinge", "weight=1"),
    "linear 0.03": ("penalty linear", "weight=0.03"),
    "linear 0.2": ("penalty linear", "weight=0.2"),
    "CVaR, level 0.95": ("CVaR", "level=0.95, dual_lr=0.05"),
    "tilted 3": ("tilted", "tilt=3, dual_lr=0.3"),
    "average": ("average", "epsilon=3, dual_lr=0.02"),
}
"""Of a row of the table its method and setting."""


def interval(values: pd.Series) -> tuple[float, float]:
    """The mean, and half a 95 % interval of Student's t."""
    count = len(values)
    half = t.ppf(0.975, count - 1) * values.std() / count**0.5
    return float(values.mean()), float(half)


def difference(
    study: str, method: str, other: str, columns: Sequence[str]
) -> tuple[float, float]:
    """Of the means over the columns, seed by seed."""
    by_seed = [
        judged(study, name).set_index("seed").sort_index()[[*columns]].mean(axis=1)
        for name in (method, other)
    ]
    return interval(by_seed[0] - by_seed[1])


def is_interval(cell: str, exact: tuple[float, float]) -> bool:
    mean, _, half = cell.partition(" ± ")
    return is_shown(mean, exact[0]) and is_shown(half or "–", exact[1])


def test_ms_marco() -> None:
    runs = pd.read_csv(RESULTS / "reranker-msmarco.csv").fillna({"setting": ""})
    runs = runs[runs["part"] == "test"]
    columns = ["train/relevance/violated", "held-out/relevance/violated"]
    columns += ["held-out/mrr@10", "held-out/length_objective"]
    listed = list(rows("evidence.md", "| MS MARCO | violated"))
    assert [name for name, *_ in listed] == [*OF_MS_MARCO]
    for name, *cells in listed:
        method, setting = OF_MS_MARCO[name]
        of = runs[(runs["method"] == method) & (runs["setting"] == setting)]
        assert len(of) == 5, name
        for cell, column in zip(cells, columns, strict=True):
            assert is_interval(cell, interval(of[column])), (name, column, cell)


def test_differences_of_safety() -> None:
    page = (DOCS / "evidence.md").read_text(encoding="utf-8")
    lines = re.findall(r"(?m)^  \| (`.*` − .*) \| (.*) \| (.*) \|$", page)
    assert len(lines) == 4
    for names, violated, kl in lines:
        method, other = names.replace("`", "").split(" − ", 1)
        for cell, columns in ((violated, VIOLATED), (kl, ["held-out/kl"])):
            exact = difference("safety", method, other, columns)
            assert is_interval(cell, exact), (names, cell, exact)


def test_power_flow() -> None:
    runs = pd.read_csv(RESULTS / "acopf.csv").query("part == 'test'")
    listed = list(rows("family.md", "| power flow, 57 buses"))
    for name, *cells, seeds in listed:
        if name.endswith("published"):
            continue
        epochs = 1000 if name.endswith("1,000 epochs") else 400
        method = name.partition("`, ")[0].strip("`").replace(",", "")
        of = runs[(runs["method"] == method) & (runs["epochs"] == epochs)]
        means = of.groupby("correction")[["gap", "worst"]].mean()
        exact = (100 * means["gap"][100], means["worst"][100], means["worst"][0])
        assert all(map(is_shown, cells, exact)), (name, cells, exact)
        assert of["seed"].nunique() == int(seeds), name
    hinges = runs[(runs["epochs"] == 400) & runs["method"].str.startswith("hinge")]
    assert len(listed) == hinges["method"].nunique() + 3


def test_samples_until_the_alarm() -> None:
    table = pd.read_csv(RESULTS / "monitoring-delay.csv")
    columns = ["monitor median", "monitor 95 %", "MAPIE median", "MAPIE 95 %"]
    listed = list(rows("requirement.md", "| allowed | good before"))
    assert len(listed) == 8
    for allowed, before, then, *cells in listed:
        count, _, rate = before.partition(" at ")
        good = 0 if before == "–" else int(count.replace(",", ""))
        key = [share(allowed), good, share(then)]
        of = table[(table[["required", "good samples", "then"]] == key).all(axis=1)]
        if good:
            of = of[of["violated"] == share(rate)]
        (row,) = of[columns].to_numpy()
        for cell, exact in zip(cells, row, strict=True):
            if pd.isna(exact):
                assert cell in ("not within 20,000", ""), cell
            else:
                assert float(cell.replace(",", "")) == exact, (key, cell, exact)


def share(text: str) -> float:
    """5 % is 0.05."""
    return float(text.removesuffix(" %")) / 100


def of_sentence(page: str, said: str) -> tuple[str, ...]:
    """The numbers in a sentence of a page, whatever its line breaks."""
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    found = re.search(said, text)
    assert found, (page, said)
    return found.groups()


N = r"(−?\d[\d.,]*\d|\d)"
"""A number in a sentence."""


def ranking(name: str) -> tuple[float, float]:
    of = judged("reranker-corpus", name).mean(numeric_only=True)
    return of["held-out/mrr@10"], of["held-out/wrong_order"]


def of_smollm(method: str, part: str) -> tuple[float, float]:
    """The share violated of both constraints, and the KL, of seed 0."""
    runs = pd.read_csv(RESULTS / "smollm.csv").query("seed == 0 and part == 'test'")
    (of,) = runs[runs["method"] == method].to_dict("records")
    violated = [of[f"{part}/{name}/violated"] for name in ("chosen", "rejected")]
    return sum(violated) / 2, of[f"{part}/kl"]


def shown_numbers() -> list[tuple[str, str, tuple[float, ...]]]:
    """Of a sentence its page, its words, and the numbers that the stored runs have."""
    ours, hinge, before = map(ranking, ("Pointwise()", "hinge 3", "untrained"))
    pair = ("reranker-corpus", "Pointwise()", "hinge 3")
    mrr = difference(*pair, ["held-out/mrr@10"])
    order = difference(*pair, ["held-out/wrong_order"])
    training = difference(*pair, ["train/relevance/violated"])
    smollm = [
        of_smollm(method, part)
        for part in ("train", "held-out")
        for method in ("Pointwise(), untuned", "penalty hinge")
    ]
    kept = pd.read_csv(RESULTS / "keeping.csv").query(
        "part == 'judged' and epochs == 12"
    )
    beyond = kept[kept["method"] == "Pointwise()"]["beyond, others"].mean()
    looks = pd.read_csv(RESULTS / "monitoring.csv").query("looks == 200")
    at_bound = looks[looks["violated"] == looks["required"]]
    alarms, naive = 100 * at_bound["monitor"], 100 * at_bound["a test in every look"]
    alarm_range = (alarms.min(), alarms.max())
    naive_range = (naive.min(), naive.max())
    return [
        ("evidence.md", rf"\(MRR@10 {N} against {N}\)", (ours[0], hinge[0])),
        (
            "evidence.md",
            rf"has an MRR@10 of {N} and orders {N} of the pairs wrongly",
            hinge,
        ),
        ("evidence.md", rf"`Pointwise\(\)` {N} and {N} \(differences", ours),
        (
            "evidence.md",
            rf"\(differences {N} ± {N} and {N} ± {N}\)",
            (-mrr[0], mrr[1], *order),
        ),
        ("evidence.md", rf"Before training they were {N} and {N}", before),
        (
            "evidence.md",
            rf"violates {N} ± {N} fewer training pairs",
            (-training[0], training[1]),
        ),
        (
            "evidence.md",
            rf"violates {N} at a KL of {N}, hinge 3 violates {N} at {N}",
            (*smollm[0], *smollm[1]),
        ),
        (
            "evidence.md",
            rf"nearly all, at a KL of {N} and {N}",
            (smollm[2][1], smollm[3][1]),
        ),
        (
            "reranker.md",
            rf"an MRR@10 of {N} on new queries, {N} before training; a tuned hinge had {N}",
            (ours[0], before[0], hinge[0]),
        ),
        ("keep.md", rf"with `Pointwise\(\)` {N} % of 60 others", (100 * beyond,)),
        (
            "requirement.md",
            rf"{N} to {N} % of 2,000 streams ever end in an alarm",
            alarm_range,
        ),
        ("requirement.md", rf"{N} to {N} % where each look", naive_range),
    ]


def numbers_of_groups_and_shares() -> list[tuple[str, str, tuple[float, ...]]]:
    """As those above."""
    groups = pd.read_csv(RESULTS / "groups.csv").query("epochs == 100 and bound == 0.9")
    of = groups.groupby("on").mean(numeric_only=True)
    pieces, divided = of.loc["mean, in pieces"], of.loc["mean"]
    stock = [100 * of["above"][on] for on in ("each day", "mean")]
    runs = pd.read_csv(RESULTS / "shares.csv")
    above = 100 * runs[runs["method"] == "CVaR"]["above"]
    short = runs.query("epochs == 10").groupby("share")["violated"]
    least, most = short.min(), short.max()
    return [
        (
            "formulations.md",
            rf"cost {N} % more than needed without the division, and still {N} of the articles are "
            rf"short, by {N} in the mean of all; with it {N} % more",
            (
                100 * pieces["above"],
                pieces["short"],
                pieces["by"],
                100 * divided["above"],
            ),
        ),
        (
            "../CHANGELOG.md",
            rf"ends {N} % above the least cost where the mean ends {N} % above",
            (stock[0], stock[1]),
        ),
        (
            "formulations.md",
            rf"its objective was {N} to {N} % above the optimum",
            (above.min(), above.max()),
        ),
        (
            "formulations.md",
            rf"After only ten epochs {N} to {N} and {N} to {N} are violated",
            (least[0.05], most[0.05], least[0.2], most[0.2]),
        ),
    ]


def test_sentences_say_what_was_measured() -> None:
    for page, said, exact in [*shown_numbers(), *numbers_of_groups_and_shares()]:
        found = of_sentence(page, said)
        assert len(found) == len(exact)
        for text, number in zip(found, exact, strict=True):
            assert is_shown(text, number), (page, said, found, exact)


def test_power_flow_with_few_instances() -> None:
    """Seed 0 of ours, without a correction."""
    runs = pd.read_csv(RESULTS / "acopf.csv").query(
        "part == 'test' and correction == 0"
    )
    listed = list(rows("few_instances.md", "| | cost"))
    for name, cost, worst in listed:
        method = (
            name.replace(",", "").partition(" the")[0].partition(" (")[0].strip("`")
        )
        if "drawn" in name:
            method = "Pointwise(memory=False), 40,000 drawn"
        of = runs[(runs["method"] == method) & runs["epochs"].isin([400, 10])]
        if method.startswith("Pointwise"):
            of = of[of["seed"] == 0]
        assert is_shown(cost, 100 * of["gap"].mean()), (name, cost)
        exact = of["worst"].mean()
        assert near(worst, exact) or is_shown(worst.strip("*"), exact), (name, worst)
    assert len(listed) == 6


def test_the_digits_that_are_lost() -> None:
    """Sentences repeat what the printed tables above them show."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    lost, held_out = re.findall(r"on \d+ +[\d.]+ +(\d+) of (\d+)", readme)[0]
    assert f"Of {held_out} held-out ones {lost} are" in readme
    page = (DOCS / "own_task.md").read_text(encoding="utf-8")
    violated = re.findall(r"kept/violated +([\d.]+) ", page)[0]
    percent = f"{100 * float(violated):.0f} %"
    assert f"which have no multiplier, {percent} are" in page
    questions = (DOCS / "faq.md").read_text(encoding="utf-8")
    assert f"no training digit is lost, and {percent} of the new ones are" in questions


RECIPES = {
    "5 epochs, ε = 6": "5 epochs, ε 6",
    "ε = 6": "ε 6",
    "average of the weights over time": "average",
    "hinge of weight 1, 20 epochs": "penalty hinge, 1",
}
"""Of a row of the table its recipe, where that has another name."""


def off_the_front(runs: pd.DataFrame, recipe: str, column: str) -> tuple[float, float]:
    """What a recipe is off the baseline at its own length loss, between its tolerances."""
    by_seed = []
    for _, rows_of in runs.groupby("seed"):
        found = rows_of.set_index("recipe")
        front = found.loc[["ε 1", "ε 2", "pointwise", "ε 4"]]
        front = front.sort_values("length objective")
        loss = found.loc[recipe, "length objective"]
        at = np.interp(loss, front["length objective"], front[column])
        by_seed.append(found.loc[recipe, column] - at)
    assert len(by_seed) == 3
    return interval(pd.Series(by_seed))


def test_what_narrows_the_gap_to_new_inputs() -> None:
    runs = pd.read_csv(RESULTS / "recipes.csv")
    runs = runs[(runs["part"] == "test") & (runs["weights"] != "best checkpoint")]
    listed = list(rows("settings.md", "| in training | violated"))
    assert len(listed) == 7
    for name, *cells in listed:
        recipe = RECIPES.get(name, name)
        for cell, column in zip(
            cells, ("violated", "wrong order", "cvar95"), strict=True
        ):
            exact = off_the_front(runs, recipe, column)
            assert is_interval(cell, exact), (name, column, cell, exact)
    (said,) = of_sentence(
        "settings.md",
        rf"frozen encoder {N} of the new pairs, of the test split, were in the wrong order",
    )
    wrong = runs[runs["recipe"] == "pointwise"]["wrong order"].mean()
    assert is_shown(said, wrong)


PROOFS = {
    "λ(x) alone, no step": "λ(x) alone",
    "one Newton step on λ": "λ(x), Newton steps: 1",
    "the network's own answer, corrected by Newton steps": "network, corrected by Newton to 1e-8",
    "the same, by gradients to 1e-8": "network, corrected by gradients to 1e-8",
}
"""Of a row of the table the answer of the stored rows."""


def is_range(cell: str, of_seeds: pd.Series) -> bool:
    """The least and the largest of the seeds in %, or one number for both, or a bound on both."""
    if cell.startswith("below "):
        return 100 * of_seeds.abs().max() < float(cell.split()[1])
    ends = [100 * of_seeds.min(), 100 * of_seeds.max()]
    numbers = cell.removesuffix(" %").split(" to ")
    if "e-" in cell:
        return float(numbers[0]) == float(f"{ends[1]:.0e}")
    if len(numbers) == 1:
        return all(is_shown(numbers[0], end) for end in ends)
    return all(map(is_shown, numbers, ends))


def test_proofs_of_answers() -> None:
    runs = pd.read_csv(RESULTS / "bounds.csv")
    assert (runs["valid"] == runs["of"]).all()
    assert set(runs["seed"]) == set(range(5))
    listed = list(rows("family.md", "| answer | type | violation, largest"))
    assert len(listed) == 6
    for name, kind, violation, *cells in listed:
        of = runs[(runs["answer"] == PROOFS[name]) & (runs["dtype"] == kind)]
        assert violation == f"{of['violation'].max():.0e}", (name, kind)
        columns = ("proved, mean", "proved, largest", "true, mean")
        for cell, column in zip(cells, columns, strict=True):
            assert is_range(cell, of[column]), (name, column, cell)
    alone = runs[runs["answer"] == "λ(x) alone"]
    below = of_sentence(
        "family.md", rf"is {N} % below the optimum in the mean, and {N} % at most"
    )
    assert is_shown(below[0], 100 * alone["bound below, mean"].mean())
    assert is_shown(below[1], 100 * alone["bound below, largest"].max())


def says(cell: str, text: str) -> bool:
    """Whether a cell has a text, or its beginning before "…"."""
    begun = cell.removesuffix(" …")
    return text.startswith(begun) if begun != cell else text.strip() == cell


def test_own_data_before_and_after() -> None:
    answers = pd.read_csv(RESULTS / "own_answers.csv", keep_default_na=False)
    answers = answers.astype(str)
    for name, before, after in rows("own_data.md", "| prompt | before"):
        prompt, _, held_out = name.partition(" *(")
        (of,) = answers[answers["prompt"] == prompt].to_dict("records")
        assert (of["part"] == "test") == bool(held_out), prompt
        assert says(before, of["before"]), (prompt, of)
        same = after.startswith("the same")
        assert same == (of["before"] == of["answer"]), (prompt, of)
        assert same or says(after, of["answer"]), (prompt, of)


def test_own_data_of_all_prompts() -> None:
    answers = pd.read_csv(RESULTS / "own_answers.csv", keep_default_na=False)
    (run,) = pd.read_csv(RESULTS / "own_data.csv").to_dict("records")
    flipped = answers["flipped"].astype(str)
    listed = {
        name: cells
        for name, *cells in rows("own_data.md", "| | kept, in training | held out")
    }
    for part, same, beyond, kl in zip(("train", "test"), *listed.values(), strict=True):
        stayed = ((answers["part"] == part) & (flipped == "False")).sum()
        count = ((answers["part"] == part) & (flipped != "")).sum()
        assert same == f"{stayed} of {count}"
        assert beyond == f"{run[f'{part}/keep/violated'] * count:.0f} of {count}"
        assert is_shown(kl, run[f"{part}/kl"])
    assert [*listed] == [
        "the same word for word",
        "moved by more than 0.01",
        "KL, nats per token",
    ]


def test_own_answers_word_for_word() -> None:
    runs = pd.read_csv(RESULTS / "keep_wording.csv").set_index("method")
    listed = list(rows("keep.md", "| recipe | new answers, word for word"))
    for name, *cells in listed:
        run = runs.loc[name.replace("`", "").removesuffix(" (keep/own)")]
        exact = run.drop("seed")
        for cell, number in zip(cells, exact, strict=True):
            assert is_shown(cell, number), (name, exact)
    assert len(listed) == len(runs)


def test_three_bounds_of_a_kl() -> None:
    runs = pd.read_csv(RESULTS / "keep_tolerances.csv").set_index("method")
    listed = list(rows("tolerance.md", "| `keep_tolerance` | √"))
    for bound, most, *cells in listed:
        assert is_shown(most, (float(bound) / 2) ** 0.5)
        exact = runs.loc[float(bound)].drop("seed")
        for cell, number in zip(cells, exact, strict=True):
            assert is_shown(cell, number), (bound, exact)
    assert len(listed) == len(runs)


def test_own_data_has_the_records_of_its_page() -> None:
    page = (DOCS / "own_data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?ms)^```json\n(.*?)^```", page)
    kept = [line for line in block.splitlines() if '"reference"' not in line]
    stored = DOCS.parent / "benchmarks/own_data/own.jsonl"
    assert stored.read_text(encoding="utf-8").splitlines() == kept


def test_how_many_hinges_are_better_in_re_ranking() -> None:
    runs = pd.read_csv(RESULTS / "reranker-corpus.csv").fillna({"setting": ""})
    runs = runs[runs["part"] == "test"]
    columns = ["held-out/mrr@10", "held-out/wrong_order"]
    means = runs.groupby(["method", "setting"])[columns].mean()
    ours = means.loc["Pointwise(), untuned", ""]
    hinges = means[means.index.get_level_values(0).str.contains("hinge")]
    higher = hinges[columns[0]] > ours[columns[0]]
    ordered = hinges[columns[1]] < ours[columns[1]]
    words = ["none", "one", "two", "three", "four", "five", "six"]
    counts = (len(hinges), (higher & ordered).sum(), (higher & ~ordered).sum())
    found = of_sentence(
        "evidence.md",
        r"Of the (\w+) hinges and squared hinges that were trained with five seeds (\w+) are a "
        r"little better in both, (\w+) in MRR@10 only, (\w+) in neither",
    )
    neither = (~higher & ~ordered).sum()
    assert [*found] == [words[count] for count in (*counts, neither)]


def test_chosen_answers_of_when2call_on_new_prompts() -> None:
    runs = pd.read_csv(RESULTS / "when2call.csv").fillna({"setting": ""})
    runs = runs[runs["part"] == "test"]
    means = runs.groupby(["method", "setting"])["held-out/chosen/violated"].mean()
    before = means["as it is", ""]
    after = means.drop(("as it is", ""))
    least, most, start = of_sentence(
        "evidence.md", rf"with all methods \({N} to {N}, before {N}\)"
    )
    assert after.min() > before
    assert is_shown(least, after.min())
    assert is_shown(most, after.max())
    assert is_shown(start, before)
