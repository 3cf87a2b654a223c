"""Two records of one prompt that ask for opposite things of one answer are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.errors import DataError
from pl_pointwise.tasks import ConversationModule, SafetyModule, When2CallModule
from pl_pointwise.tasks.language_model.contradictions import without_contradictions
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.tasks.conftest import quiet_trainer
from tests.tasks.conversation.conftest import data_of, made, written

BOUNDS = {
    "prefer": Constraint(at_least=-0.02),
    "avoid": Constraint(at_most=-4.0),
    "keep": Constraint(at_most=0.05),
    "forget": Constraint(at_least=-0.2, at_most=0.2),
}


def asking(
    kind: type = ConversationModule, bounds: Any = BOUNDS, learnt: Any = ()
) -> Any:
    """What a module asks for, without its model."""
    return SimpleNamespace(
        requirements=kind.requirements,  # type: ignore[attr-defined]
        constraints=bounds,
        formulations=bounds,
        learnt_roles={*learnt},
    )


def record(
    role: str, answer: str = "Foo.", line: int = 1, prompt: str = "Q?", **own: Any
) -> Record:
    turn = {"role": "user", "content": prompt}
    responses = (Response(role, answer, **own),)
    return Record([turn], [], responses, f"own.jsonl, line {line}")


@pytest.mark.parametrize(
    ("first", "second", "opposite"),
    [
        (("prefer", {}), ("avoid", {}), True),
        (("prefer", {"tolerance": -5.0}), ("avoid", {}), False),
        (("prefer", {}), ("avoid", {"tolerance": -0.01}), False),
        (("learn", {}), ("avoid", {}), True),
        (("keep", {}), ("avoid", {}), True),
        (("learn", {}), ("prefer", {}), False),
        (("reference", {}), ("avoid", {}), False),  # By a KL, which gives way.
        (("prefer", {}), ("forget", {"tolerance": -2.0}), True),
        (("avoid", {}), ("forget", {"tolerance": -2.0}), True),
        (("avoid", {}), ("forget", {"tolerance": -6.0}), False),
        # Which of the two is higher depends on the model.
        (("prefer", {"tolerance": 0.1, "relative": True}), ("avoid", {}), False),
        (
            ("prefer", {"tolerance": 0.1, "relative": True}),
            ("avoid", {"tolerance": 0.5, "relative": True}),
            True,
        ),
        (
            ("prefer", {"tolerance": 0.5, "relative": True}),
            ("avoid", {"tolerance": 0.1, "relative": True}),
            False,
        ),
    ],
)
def test_two_roles_contradict_each_other_by_their_bounds(
    first, second, opposite
) -> None:
    """In either order of the lines; other answers and other prompts are no matter."""
    module = asking(learnt=["learn"])
    for (one, own), (two, others) in ((first, second), (second, first)):
        records = [record(one, **own), record(two, " Foo.\n", 2, "q? ", **others)]
        free = [record(one, **own), record(two, "Bar.", 2, **others)]
        free += [record(two, line=3, prompt="Another?", **others)]
        assert without_contradictions(free, module, False) == free
        if not opposite:
            assert without_contradictions(records, module, False) == records
            continue
        with pytest.raises(DataError) as caught:
            without_contradictions(records, module, False)
        for part in ("own.jsonl, line 1", "line 2: field", one, two, "Take one of the"):
            assert part in str(caught.value)


def test_what_is_not_in_force_contradicts_nothing_and_bad_records_can_be_skipped() -> (
    None
):
    records = [record("prefer"), record("avoid", line=2), record("learn", "L.", 3)]
    only = {"prefer": BOUNDS["prefer"]}
    assert without_contradictions(records, asking(bounds=only), False) == records
    assert without_contradictions(records, asking(bounds={}), False) == records
    with pytest.warns(UserWarning, match="left out 1 of 3 .*line 2"):
        kept = without_contradictions(records, asking(), True)
    assert kept == [records[0], records[2]]


@pytest.mark.parametrize(("margin", "opposite"), [(0.1, True), (-0.1, False)])
def test_a_pair_and_the_same_pair_the_other_way_round(margin, opposite) -> None:
    def pair(chosen: str, rejected: str, line: int) -> Record:
        responses = (Response("prefer", chosen), Response("avoid", rejected))
        turn = {"role": "user", "content": "Q?"}
        return Record([turn], [], responses, f"pairs.jsonl, line {line}")

    module = asking(When2CallModule, {"ratio": Constraint(at_least=margin)})
    both = [pair("a", "b", 1), pair("b", "a", 2)]
    same = [pair("a", "b", 1), pair("a", "b", 2), pair("a", "c", 3)]
    assert without_contradictions(same, module, False) == same
    if not opposite:
        assert without_contradictions(both, module, False) == both
        return
    with pytest.raises(DataError, match=r"line 2: 'b' is preferred to 'a'.*line 1"):
        without_contradictions(both, module, False)


def test_a_refusal_that_is_asked_for_and_forbidden() -> None:
    """The same prompt among the unsafe and among the benign ones."""
    bounds = {"refuse": Constraint(at_least=-0.1), "comply": Constraint(at_most=-1.0)}
    turn = {"role": "user", "content": "Q?"}
    records = [
        Record(
            [turn],
            [],
            (Response("refusal", "No.", refusal=True),),
            f"f, line {line}",
            given_kind=kind,
        )
        for line, kind in ((1, "unsafe"), (2, "benign"))
    ]
    with pytest.raises(DataError, match=r"f, line 2: .*f, line 1 says the opposite"):
        without_contradictions(records, asking(SafetyModule, bounds), False)


def test_a_fit_refuses_them_before_it_trains(language_model_folder, tmp_path) -> None:
    """The same text as prefer and as avoid was trained without a word."""
    rows = [
        {"prompt": "Q?", "answer": "Foo.", "role": "prefer"},
        {"prompt": "Q?", "answer": "Foo.", "role": "avoid"},
        {"prompt": "R?", "answer": "Bar.", "role": "reference"},
    ]
    module = made(language_model_folder, formulation=Pointwise())
    file = written(tmp_path, rows)
    with pytest.raises(DataError) as caught:
        quiet_trainer(tmp_path, max_epochs=1).fit(module, data_of(file))
    assert str(caught.value) == (
        f'{file}, line 2: field "role" of the answer \'Foo.\' is "avoid" (s̄ ≤ -4), and the same '
        f"prompt in {file}, line 1 says the opposite: field \"role\" of the answer 'Foo.' is "
        '"prefer" (s̄ ≥ -0.02). Both cannot hold. Take one of the two out, or change its role or '
        "its bound. (invalid: skip leaves such records out.)"
    )
