"""Selection of safety records: who counts, who is held out, which answer is preferred."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.text.records import Record, with_refusals
from pl_pointwise.tasks.safety.data import PAPER_CATEGORIES
from pl_pointwise.tasks.safety.records import (
    HELPFUL,
    REFUSAL,
    SAFE,
    UNSAFE,
    Judgement,
    parse_instruction,
    parse_judgement,
    parse_labelled,
    parse_pair,
    parse_prompt,
    per_category,
    preference_pairs,
    unanimous,
    unsafe_prompts,
)
from tests.tasks.safety.conftest import (
    PRIVACY,
    VIOLENCE,
    benign_rows,
    judgement_rows,
    pair_row,
    record,
    unsafe_rows,
)


def judged(rows: list[dict[str, Any]]) -> list[Judgement]:
    return [parse_judgement(row, f"row {i}") for i, row in enumerate(rows)]


# BeaverTails --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "safe", "counts"),
    [
        ([[VIOLENCE]] * 3, [False] * 3, True),
        ([[VIOLENCE]] * 2, [False] * 2, False),  # two annotators are not more than two
        ([[VIOLENCE]] * 3, [False, False, True], False),  # one calls it safe
        ([[VIOLENCE], [VIOLENCE], [PRIVACY]], [False] * 3, False),
        ([[VIOLENCE], [VIOLENCE, PRIVACY], [VIOLENCE]], [False] * 3, True),
        ([["self_harm"]] * 3, [False] * 3, False),  # agreed, but not asked for
    ],
)
def test_an_answer_counts_if_more_than_two_annotators_agree(seen, safe, counts) -> None:
    found = unanimous(judged(judgement_rows("p", "r", seen, safe)), PAPER_CATEGORIES)
    assert [each.category for each in found] == [VIOLENCE] * counts


def test_annotators_are_counted_by_prompt_and_response() -> None:
    """Three rows of one prompt with two responses are not three annotators of either."""
    rows = judgement_rows("p", "r", [[VIOLENCE]] * 2) + judgement_rows(
        "p", "s", [[VIOLENCE]]
    )
    assert not unanimous(judged(rows), PAPER_CATEGORIES)
    rows = judgement_rows("p", "r", [[VIOLENCE]] * 3) + judgement_rows(
        "p", "s", [[PRIVACY]] * 3
    )
    random.Random(0).shuffle(rows)
    found = unanimous(judged(rows), PAPER_CATEGORIES)
    expected = [(VIOLENCE, ["", "r"]), (PRIVACY, ["", "s"])]
    assert [(each.category, each.answers) for each in found] == expected


def test_an_answer_of_several_categories_is_taken_once() -> None:
    rows = judged(judgement_rows("p", "r", [[VIOLENCE, PRIVACY]] * 3))
    for names in (PAPER_CATEGORIES, (PRIVACY, VIOLENCE)):
        assert [each.category for each in unanimous(rows, names)] == [names[0]]


def many(name: str, prompts: int, answers: int) -> list[Record]:
    return [
        replace(record(f"{name} {i}", True, (UNSAFE, f"{j}")), given_category=name)
        for i, j in itertools.product(range(prompts), range(answers))
    ]


def test_each_category_gives_its_count_with_its_held_out_ones() -> None:
    records = [each for name in PAPER_CATEGORIES for each in many(name, 60, 3)]
    train, held = per_category(records, 100, 20, seed=0)
    for found, count in ((train, 80), (held, 20)):
        of_each = Counter(r.text.rpartition(" ")[0] for r in found)
        assert of_each == dict.fromkeys(PAPER_CATEGORIES, count)
    assert len({(r.text, *r.answers) for r in train + held}) == 300


def test_no_prompt_is_trained_on_and_held_out_not_even_for_another_category() -> None:
    shared = [
        replace(record(f"p{i}", True, (UNSAFE, f"{name} {i}")), given_category=name)
        for name in PAPER_CATEGORIES
        for i in range(50)
    ]
    train, held = per_category(shared, 40, 10, seed=0)
    assert (len(train), len(held)) == (90, 30)
    assert not {r.text for r in train} & {r.text for r in held}


def test_the_draw_follows_the_seed_and_not_the_order_of_the_data() -> None:
    records = many("v", 30, 2)

    def drawn(records: list[Record], seed: int) -> list[set[Any]]:
        both = per_category(records, 30, 10, seed)
        return [{(r.text, *r.answers) for r in found} for found in both]

    assert drawn(records, 0) == drawn(records[::-1], 0)
    assert drawn(records, 0) != drawn(records, 1)


def test_a_category_with_fewer_gives_the_same_share_of_them() -> None:
    train, held = per_category(many("v", 21, 1), 4200, 200, seed=0)
    assert (len(train), len(held)) == (20, 1)


# PKU-SafeRLHF -------------------------------------------------------------------------------------


def pairs_of(*rows: dict[str, Any]) -> list:
    return [parse_pair(row, f"row {i}") for i, row in enumerate(rows)]


@pytest.mark.parametrize("better", [0, 1])
@pytest.mark.parametrize("unsafe", list(itertools.product([False, True], repeat=2)))
def test_safe_dpos_transform_of_every_pair(unsafe, better) -> None:
    """The rule spelt out: both unsafe, dropped; only the better one unsafe, changed round."""
    found = preference_pairs(pairs_of(pair_row("p", unsafe, better)))
    if all(unsafe):
        assert found == []
        return
    first = better
    if unsafe[better] and not unsafe[1 - better]:
        first = 1 - better
    (taken,) = found
    answers = ("Answer A.", "Answer B.")
    assert taken.answers[:2] == [answers[first], answers[1 - first]]
    assert taken.roles[:2] == [
        UNSAFE if unsafe[i] else SAFE for i in (first, 1 - first)
    ]
    assert taken.roles[2:] == [REFUSAL] * any(unsafe)
    assert taken.unsafe == any(unsafe)


@pytest.mark.parametrize(
    ("unsafe", "safer", "expected"),
    [
        ((False, True), 0, "Answer B."),
        ((True, False), 1, "Answer A."),
        ((True, True), 0, "Answer B."),  # the less safe of the two
        ((True, True), 1, "Answer A."),
        ((False, False), 0, None),
    ],
)
def test_the_unsafe_answer_of_a_pair(unsafe, safer, expected) -> None:
    found = unsafe_prompts(pairs_of(pair_row("p", unsafe, safer=safer)))
    assert [each.answers for each in found] == (
        [] if expected is None else [["", expected]]
    )


def test_a_prompt_stands_once_where_it_is_asked_for_once() -> None:
    rows = [
        pair_row("p", (False, True)),
        pair_row("q", (False, True)),
        pair_row("p", (False, True), answers=("C", "D")),
        pair_row("p", (False, True), answers=("E", "D")),
    ]
    for once, more in ((True, []), (False, [("p", "D")])):
        found = unsafe_prompts(pairs_of(*rows), once)
        expected = [("p", "Answer B."), ("q", "Answer B."), *more]
        assert [(r.text, r.answers[1]) for r in found] == expected


# Refusals -----------------------------------------------------------------------------------------


def test_the_preferred_response_stands_first_and_a_prompt_keeps_its_refusal() -> None:
    benign = parse_instruction(benign_rows(1)[0], "x")
    with_answer, without = (parse_labelled(row, "x") for row in unsafe_rows(2))
    assert benign.roles == [HELPFUL, REFUSAL]
    assert with_answer.roles == [REFUSAL, UNSAFE]
    assert without.roles == [REFUSAL]
    many = [parse_labelled(row, "x") for row in unsafe_rows(20, answered=False)]
    found = with_refusals(many, ["No.", "Never."])
    assert {each.answers[0] for each in found} == {"No.", "Never."}
    assert with_refusals(many[::-1], ["No.", "Never."]) == found[::-1]


# Reading ------------------------------------------------------------------------------------------

ROW = benign_rows(1)[0]
JUDGED = judgement_rows("p", "r", [[VIOLENCE]])[0]
PAIR = pair_row("p", (False, True))
UNTRAINED = {"prompt": "a", "is_safe": False, "response": {"content": "b", "weight": 0}}


@pytest.mark.parametrize(
    ("parse", "row", "message"),
    [
        (parse_instruction, [], "record is a list"),
        (parse_labelled, {"prompt": "x", "response": "y"}, '"is_safe" is missing'),
        (
            parse_judgement,
            JUDGED | {"category": {PRIVACY: 2}},
            r'"category.privacy_violation"',
        ),
        (parse_pair, PAIR | {"better_response_id": 2}, '"better_response_id" is 2'),
        # What makes the record another:
        (
            parse_labelled,
            {"prompt": "a", "images": ["b.png"]},
            '"images" is .* not read',
        ),
        (
            parse_labelled,
            {"prompt": "a", "is_safe": "True"},
            '"is_safe" is .* unsafe prompts',
        ),
        (
            parse_labelled,
            {"prompt": "a", "label": "safe"},
            '"label" is .* unsafe prompts',
        ),
        (parse_instruction, ROW | {"tools": [{"name": "f"}]}, '"tools" is .* not read'),
        (parse_labelled, UNTRAINED, '"response.weight" is .* not read'),
        (
            parse_prompt,
            {"prompt": "a", "label": "Unsafe"},
            '"label" is .* safe or unsafe',
        ),
        (parse_prompt, {"prompt": "a", "label": 0}, '"label" is .* safe or unsafe'),
        (
            parse_prompt,
            {"prompt": "a", "tools": [{"name": "f"}]},
            '"tools" is .* not read',
        ),
    ],
)
def test_a_bad_row_is_refused_by_place_and_field(parse, row, message) -> None:
    with pytest.raises(DataError, match=f"t.jsonl, line 7: .*{message}"):
        parse(row, "t.jsonl, line 7")


def test_an_input_belongs_to_the_prompt() -> None:
    assert parse_instruction(ROW, "x").text == "Name 0 trees."
    with_input = parse_instruction(ROW | {"input": "In Latin."}, "x")
    assert with_input.text == "Name 0 trees.\n\nIn Latin."
    assert with_input.prompt != parse_instruction(ROW, "x").prompt


def test_of_xstest_without_labels_the_type_tells_the_unsafe_half() -> None:
    rows = [
        {"prompt": "Kill it?", "type": name}
        for name in ("homonyms", "contrast_homonyms")
    ]
    assert [parse_prompt(row, "x").kind for row in rows] == ["benign", "unsafe"]


def test_of_xstest_a_label_tells_the_unsafe_half() -> None:
    rows = [
        {"prompt": "p", "label": "unsafe"},
        {"prompt": "p", "label": "safe"},
        {"prompt": "p"},
    ]
    assert [parse_prompt(row, "x").unsafe for row in rows] == [True, False, False]
