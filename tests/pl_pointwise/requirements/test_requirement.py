"""Requirements in every form they are written in, what they are about, and every refusal."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from pl_pointwise.requirements.requirement import EXAMPLES, Known, Requirement, RequirementError


@pytest.mark.parametrize(
    ("text", "parts", "at_most", "beyond", "complement"),
    [
        ("relevance: violated <= 0.05", ("relevance",), 0.05, 0.0, False),
        ("  relevance:violated<=.05 ", ("relevance",), 0.05, 0.0, False),
        ("relevance: q99.5 <= -2", ("relevance",), 0.005, -2.0, False),
        ("mcq/reference/tool_call: q90 <= 0", ("mcq", "reference", "tool_call"), 0.1, 0.0, False),
        ("over_refusal <= 0.05", ("over_refusal",), 0.05, None, False),
        ("mrr@10 >= 0.3", ("mrr@10",), 0.7, None, True),
        # Names that end as a statistic does, or are one.
        ("length_q90 <= 0.1", ("length_q90",), 0.1, None, False),
        ("violated <= 0.1", ("violated",), 0.1, None, False),
    ],
)
def test_every_form_is_read(
    text: str, parts: tuple[str, ...], at_most: float, beyond: float | None, complement: bool
) -> None:
    found = Requirement.parse(text)
    assert found.text == text
    assert found.parts == parts
    assert found.at_most == pytest.approx(at_most)
    assert found.beyond == beyond
    assert found.complement is complement


@pytest.mark.parametrize(
    "text", ["relevance", "lost(refuse) <= predecessor", "relevance: q100 <= 0.5"]
)
def test_what_cannot_be_read_is_refused_with_all_forms(text: str) -> None:
    with pytest.raises(RequirementError) as error:
        Requirement.parse(text)
    assert str(error.value) == f"{text!r} is no requirement. Write {EXAMPLES}."


def test_the_forms_that_the_refusal_shows_can_be_read() -> None:
    shown = EXAMPLES.split('"')[1::2]
    assert len(shown) == 4
    for text in shown:
        Requirement.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relevance: violated >= 0.05", "Write <="),
        ("relevance: violated <= -0.05", "-0.05 is no share"),
        ("relevance: q0 <= 0.5", "0 is no share"),
        ("mrr@10 >= 0", "0 is no share"),
        ("lost(a) <= 1.5", "1.5 is no share"),
        ("lost(refuse) >= 0.1", "lost(…) <= …"),
        ("gained(refuse) <= 0.1", "gained(…) >= …"),
        ("mrr >= predecessor + 0.1", "an improvement of every draw"),
    ],
)
def test_what_no_sample_can_certify_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequirementError, match=re.escape(message)) as error:
        Requirement.parse(text)
    assert repr(text) in str(error.value)


def test_losses_are_what_is_counted() -> None:
    violations = np.array([-1.0, 0.0, 0.5, 0.6, math.inf, math.nan])
    assert Requirement.parse("a: violated <= 0.1").losses(violations).tolist() == [0, 0, 1, 1, 1, 1]
    assert Requirement.parse("a: q90 <= 0.5").losses(violations).tolist() == [0, 0, 0, 1, 1, 1]
    values = np.array([0.0, 0.25, 1.0, math.nan])
    assert Requirement.parse("m <= 0.1").losses(values).tolist() == [0, 0.25, 1, 1]
    assert Requirement.parse("m >= 0.1").losses(values).tolist() == [1, 0.75, 0, 1]
    assert Requirement.parse("m >= 0.1").losses(np.zeros(0)).tolist() == []
    # Whole numbers and truths, as a metric may have them.
    assert Requirement.parse("m <= 0.1").losses(np.array([True, False])).dtype == np.float64


def test_values_without_a_loss_are_refused() -> None:
    with pytest.raises(RequirementError, match=r"between -0\.5 and 1"):
        Requirement.parse("m >= 0.1").losses(np.array([-0.5, 1.0, math.nan]))


KNOWN = Known(
    constraints=["relevance", "refuse"],
    metrics=["mrr@10", "over_refusal"],
    datasets={"mcq": ["relevance"], "over_refusal": ["relevance", "refuse"]},
    categories={"test": ["malware", "fraud"], "mcq": ["tool_call", "direct"]},
)


def subject(text: str, known: Known = KNOWN) -> tuple[str | None, str, str | None]:
    found = known.subject(Requirement.parse(text))
    assert found.requirement.text == text
    return found.dataset, found.quantity, found.category


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("refuse/malware: violated <= 0.1", (None, "refuse", "malware")),
        ("mcq: violated <= 0.1", ("mcq", "relevance", None)),
        ("mcq/relevance/direct: violated <= 0.1", ("mcq", "relevance", "direct")),
        ("over_refusal/over_refusal <= 0.05", ("over_refusal", "over_refusal", None)),
        ("mrr@10 >= 0.3", (None, "mrr@10", None)),
        ("mcq/mrr@10/direct >= 0.3", ("mcq", "mrr@10", "direct")),
    ],
)
def test_a_name_is_looked_up(text: str, expected: tuple[str | None, str, str | None]) -> None:
    assert subject(text) == expected


def test_a_metric_that_is_called_as_no_data_set_is_of_the_splits() -> None:
    known = Known(["refuse"], ["over_refusal"])
    assert subject("over_refusal <= 0.05", known) == (None, "over_refusal", None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("relevanse: violated <= 0.05", ["'relevanse'", "relevance, refuse, mcq/…"]),
        ("mrr >= 0.3", ["'mrr'", "mrr@10"]),
        ("refuse/violated <= 0.05", ['write "refuse: violated <= 0.05"']),
        ("over_refusal <= 0.05", ["over_refusal/mrr@10, over_refusal/over_refusal"]),
        ("refuse/malwear: violated <= 0.1", ["'malwear'", "malware, fraud"]),
        # A constraint that it does not carry.
        ("mcq/refuse: violated <= 0.1", ["'refuse'", "tool_call, direct"]),
        ("over_refusal/refuse/malware: violated <= 0.1", ["'malware'", "no categories"]),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(text: str, named: list[str]) -> None:
    with pytest.raises(RequirementError) as error:
        subject(text)
    assert not [part for part in [repr(text), *named] if part not in str(error.value)]
