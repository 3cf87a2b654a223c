"""Requirements in every form they are written in, what they are about, and every refusal."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from pandas import DataFrame

from pl_pointwise.requirements.requirement import (
    EXAMPLES,
    Requirement,
    RequirementError,
)
from pl_pointwise.requirements.samples import require_known


@pytest.mark.parametrize(
    ("text", "name", "at_most", "beyond", "complement"),
    [
        ("relevance: violated <= 0.05", "relevance", 0.05, 0.0, False),
        ("  relevance:violated<=.05 ", "relevance", 0.05, 0.0, False),
        ("relevance: q99.5 <= -2", "relevance", 0.005, -2.0, False),
        ("refuse/ a/b : q90 <= 0", "refuse/a/b", 0.1, 0.0, False),
        ("over_refusal <= 0.05", "over_refusal", 0.05, None, False),
        ("mrr@10 >= 0.3", "mrr@10", 0.7, None, True),
        # Names that end as a statistic does, or are one.
        ("length_q90 <= 0.1", "length_q90", 0.1, None, False),
        ("violated <= 0.1", "violated", 0.1, None, False),
    ],
)
def test_every_form_is_read(
    text: str, name: str, at_most: float, beyond: float | None, complement: bool
) -> None:
    found = Requirement.parse(text)
    assert found.text == text
    assert (found.quantity, found.category) == (
        name.partition("/")[0],
        name.partition("/")[2],
    )
    assert found.at_most == pytest.approx(at_most)
    assert found.beyond == beyond
    assert found.complement is complement


@pytest.mark.parametrize(
    "text",
    [
        "relevance",
        "gained(refuse) >= 0.1",
        "lost(refuse) <= predecessor",
        "relevance: q100 <= 0.5",
        "refuse/ : violated <= 0.1",
        "lost(refuse/) <= 0.1",
    ],
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
        ("lost(refuse) >= 0.1", "Write <="),
        ("mrr >= predecessor + 0.1", "an improvement of every draw"),
    ],
)
def test_what_no_sample_can_certify_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequirementError, match=re.escape(message)) as error:
        Requirement.parse(text)
    assert repr(text) in str(error.value)


def test_losses_are_what_is_counted() -> None:
    violations = np.array([-1.0, 0.0, 0.5, 0.6, math.inf, math.nan])
    assert Requirement.parse("a: violated <= 0.1").losses(violations).tolist() == [
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    assert Requirement.parse("a: q90 <= 0.5").losses(violations).tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    values = np.array([0.0, 0.25, 1.0, math.nan])
    assert Requirement.parse("m <= 0.1").losses(values).tolist() == [0, 0.25, 1, 1]
    assert Requirement.parse("m >= 0.1").losses(values).tolist() == [1, 0.75, 0, 1]
    assert Requirement.parse("m >= 0.1").losses(np.zeros(0)).tolist() == []
    # Whole numbers and truths, as a metric may have them.
    assert (
        Requirement.parse("m <= 0.1").losses(np.array([True, False])).dtype
        == np.float64
    )


def test_values_without_a_loss_are_refused() -> None:
    with pytest.raises(RequirementError, match=r"between -0\.5 and 1"):
        Requirement.parse("m >= 0.1").losses(np.array([-0.5, 1.0, math.nan]))


KNOWN = DataFrame(
    [
        ("test", "constraint", "relevance", "malware"),
        ("test", "constraint", "refuse", "fraud"),
        ("test", "metric", "mrr@10", ""),
        ("val", "metric", "over_refusal", "of selection"),
        ("mcq", "constraint", "choice", "tool_call"),
    ],
    columns=["dataset", "kind", "quantity", "category"],
)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("refuse/malware: violated <= 0.1", []),
        ("over_refusal <= 0.1", []),
        (
            "relevanse: violated <= 0.05",
            ["constraint 'relevanse'", "There are: relevance, refuse."],
        ),
        ("mrr >= 0.3", ["'mrr'", "mrr@10, over_refusal"]),
        ("refuse/violated <= 0.05", ['write "refuse: violated <= 0.05"']),
        ("refuse/malwear: violated <= 0.1", ["'malwear'", "fraud, malware"]),
        ("mcq/tool_call: violated <= 0.1", ["'mcq'", "give them as the test data"]),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    text: str, named: list[str]
) -> None:
    if not named:
        require_known(KNOWN, [Requirement.parse(text)])
        return
    with pytest.raises(RequirementError) as error:
        require_known(KNOWN, [Requirement.parse(text)])
    assert not [part for part in [repr(text), *named] if part not in str(error.value)]
