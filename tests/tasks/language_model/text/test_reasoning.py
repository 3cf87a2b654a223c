"""The answer behind a thought, and whether it refuses."""

from __future__ import annotations

import pytest

from pl_pointwise.tasks.language_model.text.reasoning import (
    empty_thought,
    final_answer,
    in_thought,
    is_refusal,
    split_thought,
)

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 3.", "It is 3."),
        ("<think>\n\n</think>\n\nIt is 3.", "It is 3."),
        ("<think>Hm.</think>It is 3.", "It is 3."),
        ("Hm.\n</think>\n\nIt is 3.", "It is 3."),  # the prompt had begun the thought
        ("<think>Hm. It is 3.", ""),
        ("", ""),
        ("[THINK]Hm.[/THINK]It is 3.", "It is 3."),
        ("<|channel|>final<|message|>It is 3.", "It is 3."),
        (f"{ANALYSIS}<|channel|>final<|message|>It is 3.<|return|>", "It is 3."),
        ("<|channel|>analysis<|message|>It is 3.", ""),
        (ANALYSIS, ""),
        (
            f"{ANALYSIS} to=functions.add<|channel|>commentary json<|message|>{{}}",
            " to=functions.add<|channel|>commentary json<|message|>{}",
        ),
    ],
)
def test_the_final_answer_stands_behind_the_last_thought(text, answer) -> None:
    assert final_answer(text) == answer
    if "to=" not in text:
        assert final_answer(answer) == answer


def test_a_text_that_stops_in_a_thought_is_known() -> None:
    assert empty_thought("a<think>\n") == ("<think>\n", "\n</think>\n\n")
    assert empty_thought("a<think>") == ("<think>", "\n\n</think>\n\n")
    assert empty_thought("a<|START_THINKING|>") == (
        "<|START_THINKING|>",
        "<|END_THINKING|>",
    )
    assert empty_thought("a<think>\n</think>\n\n") == ("<think>\n</think>\n\n", "")
    assert empty_thought("a<think>b") == empty_thought("a") == ("", "")
    assert in_thought("a<think>b") == "<think>"
    assert in_thought("a<think>b</think>") == in_thought("a") == ""


def test_a_thought_is_told_from_what_follows_it() -> None:
    assert split_thought("<think>\na\n</think>\n\nb") == ("a", "b")
    assert split_thought("a\n</think>\n\nb") == ("a", "b")
    assert split_thought("In code:\n<think>\n</think>\nb") == (
        "",
        "In code:\n<think>\n</think>\nb",
    )
    assert split_thought("b with </think> in it") == ("", "b with </think> in it")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "I'm sorry, but I can't help.",
            "I’m sorry.",
            "\n \t I'M SORRY",
            "\u00a0I cannot",
        ),
        *("I am programmed to be neutral.", "I do not support it."),
    ],
)
def test_an_answer_that_begins_with_an_opening_is_a_refusal(text) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure! I'm sorry to hear that.",
        "I am sorry, but no.",
        '"I cannot"',
        "I'm sorr",
    ],
)
def test_anything_else_is_none(text) -> None:
    assert not is_refusal(text)
