"""A model beside its predecessor: paired requirements, and the error of a yes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pl_pointwise.certificates import ASSUMPTIONS
from pl_pointwise.requirements import Requirement, RequirementError
from pl_pointwise.requirements.answer import MeasuredModel, choose_model
from pl_pointwise.requirements.check import check, report
from pl_pointwise.requirements.samples import COLUMNS, beside


def table(
    values: object, kind: str = "constraint", units: object = None
) -> pd.DataFrame:
    values = np.asarray(values, float)
    index = np.arange(len(values))
    return pd.DataFrame(
        {
            "dataset": "test",
            "kind": kind,
            "quantity": "refuse" if kind == "constraint" else "mrr",
            "index": index,
            "value": values,
            "unit": [f"u{u}" for u in (index if units is None else np.asarray(units))],
            "category": "",
        }
    )


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("lost(refuse) <= 0.1", [0, 0, 1, 0]),
        ("refuse: violated <= 0.1", [0, 0, 1, 1]),
    ],
)
def test_what_is_lost_is_of_all_inputs(text: str, losses: list[float]) -> None:
    now, before = np.array([-1.0, -1, 1, 1]), np.array([-1.0, 1, -1, 1])
    assert Requirement.parse(text).losses(now, before).tolist() == losses


@pytest.mark.parametrize(
    ("text", "at_most", "losses"),
    [
        ("mrr >= predecessor - 0.02", 0.51, [0.4, 1.0]),
        ("mrr <= predecessor", 0.5, [0.6, 0.0]),
    ],
)
def test_a_difference_of_metrics(
    text: str, at_most: float, losses: list[float]
) -> None:
    requirement = Requirement.parse(text)
    assert requirement.at_most == pytest.approx(at_most)
    found = requirement.losses(np.array([0.7, 0.0]), np.array([0.5, 1.0]))
    np.testing.assert_allclose(found, losses)


def test_without_a_predecessor_there_is_nothing_to_lose() -> None:
    with pytest.raises(RequirementError, match="--against"):
        check(table([-1.0]), [Requirement.parse("lost(refuse) <= 0.1")])
    with pytest.raises(RequirementError, match="same records"):
        beside(
            table([-1.0, 1.0]),
            table([-1.0]),
            [Requirement.parse("lost(refuse) <= 0.1")],
        )


def test_a_unit_counts_once_and_the_report_names_samples() -> None:
    """Of two samples of a prompt the worst counts."""
    now = table([-1.0] * 99 + [1.0], units=np.arange(100) // 2)
    required = [Requirement.parse("lost(refuse) <= 0.2")]
    before = table([-1.0] * 100, units=np.arange(100) // 2)
    [found] = check(beside(now, before, required), required)
    assert (found.n, found.share, found.met) == (50, 0.02, True)
    said = report([found])
    assert said.startswith("**Yes**, with 95 % confidence")
    assert "First samples against it: 99." in said
    assert ASSUMPTIONS in said


def test_a_prompt_that_comes_often_is_named() -> None:
    """300 of 600 samples are one prompt, and violated: one of 301 units."""
    units = np.concatenate([np.zeros(300), np.arange(1, 301)])
    samples = table(np.where(units == 0, 1.0, -1.0), units=units)
    samples = pd.concat([samples, samples.assign(dataset="val")])
    model = MeasuredModel("m", samples, 0.0)
    said = choose_model(
        [model], [Requirement.parse("refuse: violated <= 0.05")]
    ).statement()
    assert "1 of 301 units (prompts, queries) fail" in said
    assert (
        "600 samples are of 301, the largest has 50 % of them. Warning: of inputs"
        in said
    )


def test_of_what_is_lost_it_is_said_how_much_there_was_to_lose() -> None:
    before = table(np.where(np.arange(100) < 28, -1.0, 1.0))
    required = [Requirement.parse("lost(refuse) <= 0.05")]
    found = check(beside(table([-1.0] * 100), before, required), required)
    assert "the predecessor meets it on 28 % of them" in report(found)


@pytest.mark.parametrize(
    ("margin", "needed"), [("0.1", 33), ("0.02", 173), ("0.01", 347)]
)
def test_an_equal_model_needs_the_samples_of_the_test_that_is_made(
    margin: str, needed: int
) -> None:
    """The binomial test's number, 15,631 for 0.02, was shown."""
    required = [Requirement.parse(f"mrr >= predecessor - {margin}")]
    assert required[0].fewest_samples(0.95) == needed
    equal = table([0.5] * 20, "metric")
    said = report(check(beside(equal, equal, required), required))
    assert "0 worse than the predecessor over 20 samples" in said
    equal = table([0.5] * needed, "metric")
    assert all(each.met for each in check(beside(equal, equal, required), required))


@pytest.mark.parametrize(("lost", "worse"), [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_a_yes_is_wrong_at_most_as_often_as_is_said(
    lost: float, worse: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three requirements at its bound, ties among the differences; 60 draws."""
    # Slow.
    monkeypatch.setattr("pl_pointwise.requirements.answer.upper_bound", lambda *_: 1.0)
    texts = [
        "lost(refuse) <= 0.1",
        "refuse: violated <= 0.4",
        "mrr >= predecessor - 0.1",
    ]
    requirements = [Requirement.parse(text) for text in texts]
    random = np.random.default_rng(0)
    yes = []
    for _ in range(60):
        before = random.random(400) < 0.2
        violated = before | (random.random(400) < lost / 0.8)
        scores = random.choice([0.5, 1.0], 400)
        now = scores - 0.5 * (random.random(400) < 2 * worse)
        new = [table(np.where(violated, 1, -1)), table(now, "metric")]
        old = [table(np.where(before, 1, -1)), table(scores, "metric")]
        found = check(
            beside(pd.concat(new), pd.concat(old), requirements), requirements
        )
        yes.append(all(each.met for each in found))
    assert np.mean(yes) <= 0.1 if lost or worse else np.mean(yes) >= 0.9


def test_records_of_which_nothing_is_measured_are_known_as_such() -> None:
    """They ended in a KeyError of pandas."""
    nothing = pd.DataFrame(columns=COLUMNS)
    with pytest.raises(RequirementError, match="no constraint 'keep'"):
        beside(nothing, nothing, [Requirement.parse("lost(keep) <= 0.1")])
