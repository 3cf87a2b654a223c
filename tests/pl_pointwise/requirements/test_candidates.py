"""What happened to each candidate of ``compare --require`` is told as it was."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from pl_pointwise.certificates import violation_bound
from pl_pointwise.requirements import Requirement
from pl_pointwise.requirements.answer import Answer, MeasuredModel, choose_model

REQUIRED = "found: violated <= 0.1"


def model(
    name: str, objective: float, selection: int, certification: int, size: float = 1.0
) -> MeasuredModel:
    """So many violate of 51 and of 76, by ``size``."""
    parts = []
    for dataset, n, violated in (("val", 51, selection), ("test", 76, certification)):
        value = np.where(np.arange(n) < violated, size, size - 5)
        columns = {
            "dataset": dataset,
            "kind": "constraint",
            "quantity": "found",
            "category": "",
        }
        units = [f"{dataset} {k}" for k in range(n)]
        parts.append(
            pd.DataFrame({**columns, "unit": units, "value": value, "index": range(n)})
        )
    return MeasuredModel(name, pd.concat(parts), objective)


def answer(*models: MeasuredModel) -> Answer:
    return choose_model(models, [Requirement.parse(REQUIRED)])


def happened(found: Answer) -> dict[str, str]:
    cells = found.table().cells
    return dict(zip(cells["model"], cells["what happened"], strict=True))


def test_of_equal_p_values_the_smallest_violations_stand_first() -> None:
    """The one with the best objective did, and all others were dropped: one of five was tested."""
    found = answer(
        model("objective-only", 1.0, 1, 5, size=4.0),
        model("linear", 2.0, 1, 4, size=3.0),
        model("hinge", 4.0, 1, 2, size=2.0),
        model("pointwise", 3.0, 1, 1, size=0.1),
        model("worse", 9.0, 1, 0, size=0.2),
    )
    assert happened(found) == {
        "pointwise": "tested: certified, chosen",
        "linear": "tested: not certified",
        "objective-only": "not reached",
        "hinge": "dropped: pointwise is no worse",
        "worse": "dropped: pointwise is no worse",
    }
    said = found.statement()
    assert "pointwise was shown to meet the requirement" in said
    assert "2 of 3 in it were tested one after the other" in said
    assert "cannot tell 5 models apart: each has p = 0.031" in said


def test_what_was_not_tested_is_not_said_to_have_failed() -> None:
    """Of one of five it was said that none of the five is certified, and another came nearest."""
    found = answer(
        model("first", 3.0, 0, 8),
        model("second", 2.0, 1, 4),
        model("third", 1.0, 2, 3),
        model("dropped", 5.0, 1, 1),
    )
    said = found.statement()
    assert said.startswith(
        "None of the 1 tested of 4 models is certified to meet the requirement"
    )
    assert (
        "dropped comes nearest, as its largest p is the smallest; it was not tested"
        in said
    )
    assert f"1 of 76 samples fail, p = {binom.cdf(1, 76, 0.1):.2g}" in said
    assert happened(found) == {
        "first": "tested: not certified",
        "second": "not reached",
        "third": "not reached",
        "dropped": "dropped: first is no worse",
    }
    stored = found.as_dict()
    assert (stored["tested"], stored["nearest"]) == (["first"], "dropped")
    assert [each["model"] for each in stored["models"]] == [
        "first",
        "second",
        "third",
        "dropped",
    ]


def test_the_table_has_p_and_size_of_each_requirement() -> None:
    found = choose_model(
        [model("a", 1.0, 1, 2, size=2.0), model("b", 2.0, 0, 3)],
        [Requirement.parse(REQUIRED), Requirement.parse("found: q90 <= 0.5")],
    )
    cells = found.table().cells.set_index("model")
    assert cells.loc["a", f"p, {REQUIRED}"] == f"{binom.cdf(2, 76, 0.1):.2g}"
    assert float(cells.loc["a", f"size, {REQUIRED}"]) == pytest.approx(
        0.5 + float(cells.loc["a", "size, found: q90 <= 0.5"]), abs=0.01
    )


@pytest.mark.parametrize("n", [300, 1000])
def test_bounds_that_are_said_to_hold_together_do(n: int) -> None:
    """Two candidates, one just above what is required: some bound was wrong in 7 % of draws."""
    rates, random, wrong, draws = (0.075, 0.1001), np.random.default_rng(n), 0, 1500
    for _ in range(draws):
        violated = [int(random.binomial(n, rate)) for rate in rates]
        bounds = [violation_bound(each, n, 1 - 0.05 / 2) for each in violated]
        wrong += any(bound < rate for bound, rate in zip(bounds, rates, strict=True))
    assert wrong / draws <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / draws)
    found = answer(model("a", 2.0, 0, 2), model("b", 1.0, 4, 4))
    for position, name in enumerate(("a", "b")):
        assert found.models[position].name == name
    # Those are the bounds that are reported, whatever is chosen.
    [finding] = found.findings
    violated = 2 if found.shown == 0 else 4
    assert finding.bound == pytest.approx(violation_bound(violated, 76, 1 - 0.05 / 2))
    assert "hold together, whichever model is shown (Bonferroni" in found.statement()


def test_a_metric_of_fractions_needs_more_samples_than_a_share() -> None:
    """With 59 a perfect model could not be certified."""
    for rate, share, metric in ((0.05, 59, 63), (0.01, 299, 308), (0.25, 11, 12)):
        required = Requirement.parse(f"mrr <= {rate}")
        assert required.fewest_samples(0.95) == metric
        assert required.fewest_samples(0.95, zero_one=True) == share
        assert Requirement.parse(f"a: violated <= {rate}").fewest_samples(0.95) == share
