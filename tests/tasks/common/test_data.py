"""Three splits: no group on two of them, and of every category its part."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.data import (
    check_fractions,
    hold_out,
    side_of_held_out,
    split_by_group,
    warn_of_shared,
)
from pl_pointwise.tasks.reranker.records import Record

NAMES = [f"group {number}" for number in range(60)]


@given(
    groups=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 5),
)
def test_no_group_stands_on_both_sides(
    groups: list[str], share: float, seed: int
) -> None:
    held = hold_out(groups, [share], seed)
    out = {group for group, part in zip(groups, held, strict=True) if part}
    kept = {group for group, part in zip(groups, held, strict=True) if not part}
    assert not out & kept
    assert kept
    assert hold_out(groups, [share], seed) == held
    smallest = min(groups.count(group) for group in groups)
    assert sum(held) <= max(share * len(groups), smallest)
    if share > 0 and len(set(groups)) > 1:
        assert out
    if share == 0:
        assert not out
    several = [str(i) for i in range(50)]
    assert hold_out(several, [0.2], seed) != hold_out(several, [0.2], seed + 1)


def test_what_is_held_out_is_what_it_has_always_been() -> None:
    """Published tables depend on it: an order by a hash, each group that still fits."""
    groups = [
        name for number, name in enumerate(NAMES[:12]) for _ in range(1 + number % 3)
    ]
    held = {
        g for g, part in zip(groups, hold_out(groups, [0.25], 3), strict=True) if part
    }
    assert held == {"group 1", "group 8", "group 9"}
    both = hold_out(groups, [0.25, 0.25], 3)
    assert {g for g, part in zip(groups, both, strict=True) if part == 1} == held


@given(
    kinds=st.lists(
        st.sampled_from(["", "tool_call", "cannot_answer"]), min_size=1, max_size=40
    ),
    shares=st.tuples(st.floats(0, 0.3), st.floats(0, 0.3)),
    seed=st.integers(0, 5),
)
@example(kinds=["a", "b", "c"] * 9, shares=(0.3, 0.3), seed=0)
def test_each_category_gives_its_part(
    kinds: list[str], shares: tuple[float, float], seed: int
) -> None:
    groups = [NAMES[number] for number in range(len(kinds)) for _ in range(2)]
    twice = [kind for kind in kinds for _ in range(2)]
    parts = hold_out(groups, shares, seed, twice)
    assert parts[::2] == parts[1::2]
    assert 0 in parts
    alone = hold_out(groups, shares[:1], seed, twice)
    assert [part == 1 for part in parts] == [part == 1 for part in alone]
    for kind in set(kinds):
        of_it = Counter(
            part for part, own in zip(parts, twice, strict=True) if own == kind
        )
        assert of_it[0]
        for part, share in enumerate(shares, start=1):
            assert abs(of_it[part] - share * twice.count(kind)) <= 4  # Two groups.


def test_what_small_categories_lack_is_taken_from_the_next() -> None:
    """Rounded down in each of ten categories, nothing would be held out."""
    groups = [str(number) for number in range(60)]
    kinds = [f"kind {number % 10}" for number in range(60)]
    parts = hold_out(groups, [0.15, 0.15], 0, kinds)
    assert Counter(parts) == {0: 42, 1: 9, 2: 9}
    for kind in set(kinds):
        of_it = Counter(
            part for part, own in zip(parts, kinds, strict=True) if own == kind
        )
        assert of_it[0] >= 2
        assert of_it[1] <= 2
        assert of_it[2] <= 2


def record(query: str, category: str = "") -> Record:
    return Record(query, ("p",), None, f"f.jsonl, {query}", category)


def test_records_are_split_by_name_and_keep_their_order() -> None:
    records = [record(str(number)) for number in range(20)]
    groups = [each.query for each in records]
    found = split_by_group(records, groups, {"val": 0.2, "test": 0.3}, 0, "query")
    assert {name: len(part) for name, part in found.items()} == {
        "train": 10,
        "val": 4,
        "test": 6,
    }
    for part in found.values():
        assert [int(each.query) for each in part] == sorted(
            int(each.query) for each in part
        )
    assert list(
        split_by_group(records, groups, {"val": 0.2, "test": 0.0}, 0, "query")
    ) == [
        "train",
        "val",
    ]


def test_parts_that_too_few_groups_leave_empty_are_named() -> None:
    records = [record("a"), record("b")]
    with pytest.warns(
        UserWarning, match=r"a: .*two of different query.* held out for val\."
    ):
        assert [*split_by_group(records, ["a", "a"], {"val": 0.2}, 0, "query")] == [
            "train"
        ]
    with pytest.raises(
        DataError, match=r"a: .*two of different query.*test_fraction to 0"
    ):
        split_by_group(records, ["a", "b"], {"val": 0.2, "test": 0.2}, 0, "query")


@pytest.mark.parametrize(("val", "test"), [(1.0, 0.0), (0.1, -0.1), (0.5, 0.5)])
def test_fractions_that_leave_nothing_are_refused(val: float, test: float) -> None:
    with pytest.raises(DataError, match=f"val_fraction={val}, test_fraction={test}: "):
        check_fractions(val, test)


def test_held_out_records_are_divided_in_proportion() -> None:
    records = [
        replace(record(str(number // 2)), category="x" if number < 20 else "y")
        for number in range(40)
    ]
    sides = side_of_held_out(records, {"val": 0.05, "test": 0.15}, 0)
    assert sides.count("test") == 30
    # In groups of two.
    assert {sides[:20].count("test"), sides[20:].count("test")} == {14, 16}
    assert sides[::2] == sides[1::2]
    assert set(side_of_held_out(records, {"val": 0.05, "test": 0.0}, 0)) == {"val"}
    assert set(side_of_held_out(records, {"val": 0.0, "test": 0.1}, 0)) == {"test"}
    assert side_of_held_out([], {"val": 0.1, "test": 0.1}, 0) == []


def test_texts_of_two_splits_are_reported_for_every_pair() -> None:
    texts = {"train": ["a", "b"], "val": ["c"], "test": ["a", "c", "d"]}
    splits = {name: [record(text) for text in of_it] for name, of_it in texts.items()}
    sources = {"train": "t.jsonl", "val": "the val part of t.jsonl", "test": "u.jsonl"}
    with pytest.warns(UserWarning, match="results on it flatter") as caught:
        warn_of_shared(splits, sources)
    assert [str(each.message).partition(" too")[0] for each in caught] == [
        "u.jsonl: 1 of 3 prompts are in t.jsonl",
        "u.jsonl: 1 of 3 prompts are in the val part of t.jsonl",
    ]
