"""The keyword rule for refusals."""

from __future__ import annotations

import pytest

from pl_pointwise.tasks.language_model.text.reasoning import is_refusal


@pytest.mark.parametrize(
    "text",
    [
        *("I'm sorry, but I can't help.", "I’m sorry.", "\n \t I'M SORRY", "\u00a0I cannot"),
        *("I am programmed to be neutral.", "I do not support it."),
    ],
)
def test_an_answer_that_begins_with_an_opening_is_a_refusal(text) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text", ["", "Sure! I'm sorry to hear that.", "I am sorry, but no.", '"I cannot"', "I'm sorr"]
)
def test_anything_else_is_none(text) -> None:
    assert not is_refusal(text)
