"""Records that ask for opposite things of one answer to one prompt are named before training."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.tasks import ConversationModule, SafetyModule, When2CallModule
from pl_pointwise.tasks.language_model.contradictions import warn_of_contradictions
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


def told(records: list[Record], module: Any) -> str:
    """The warning, or ""."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_contradictions(records, module)
    return "".join(str(each.message) for each in caught)


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
        (("learn", {}), ("avoid", {}), True),
        (("keep", {}), ("avoid", {}), True),
        (("learn", {}), ("prefer", {}), False),
        (("reference", {}), ("avoid", {}), False),  # Nothing that is enforced.
        # A bound of a record's own may leave room for both.
        (("prefer", {"tolerance": -5.0}), ("avoid", {}), False),
        (("avoid", {}), ("forget", {"tolerance": -2.0}), False),
    ],
)
def test_two_roles_contradict_each_other(first, second, opposite) -> None:
    """In either order of the lines; other answers and other prompts are no matter."""
    module = asking(learnt=["learn"])
    for (one, own), (two, others) in ((first, second), (second, first)):
        records = [record(one, **own), record(two, " Foo.\n", 2, "q? ", **others)]
        free = [record(one, **own), record(two, "Bar.", 2, **others)]
        free += [record(two, line=3, prompt="Another?", **others)]
        assert not told(free, module)
        said = told(records, module)
        assert bool(said) == opposite
        if opposite:
            for part in ("1 of 2", "own.jsonl, line 1: ", "own.jsonl, line 2: "):
                assert part in said


def test_what_is_not_in_force_contradicts_nothing() -> None:
    records = [record("prefer"), record("avoid", line=2), record("learn", "L.", 3)]
    assert not told(records, asking(bounds={"prefer": BOUNDS["prefer"]}))
    assert not told(records, asking(bounds={}))
    assert "1 of 3 records" in told(records, asking())


@pytest.mark.parametrize(("margin", "opposite"), [(0.1, True), (-0.1, False)])
def test_a_pair_and_the_same_pair_the_other_way_round(margin, opposite) -> None:
    def pair(chosen: str, rejected: str, line: int) -> Record:
        responses = (Response("prefer", chosen), Response("avoid", rejected))
        turn = {"role": "user", "content": "Q?"}
        return Record([turn], [], responses, f"pairs.jsonl, line {line}")

    module = asking(When2CallModule, {"ratio": Constraint(at_least=margin)})
    both = [pair("a", "b", 1), pair("b", "a", 2)]
    same = [pair("a", "b", 1), pair("a", "b", 2), pair("a", "c", 3)]
    assert not told(same, module)
    assert bool(told(both, module)) == opposite
    if opposite:
        said = told(both, module)
        assert re.search(r"line 2: 'b' is preferred to 'a'; .*line 1: 'a' is", said)


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
    module = asking(SafetyModule, bounds)
    again = replace(records[0], where="f, line 3")
    assert not told(
        [records[0], again], module
    )  # Both are unsafe: comply asks nothing.
    said = told(records, module)
    assert re.search(r"f, line 2: .*\(comply\); f, line 1: .*\(refuse\)", said)


def test_a_fit_names_them_before_it_trains(language_model_folder, tmp_path) -> None:
    """The same text as prefer and as avoid was trained without a word."""
    rows = [
        {"prompt": "Q?", "answer": "Foo.", "role": "prefer"},
        {"prompt": "Q?", "answer": "Foo.", "role": "avoid"},
        {"prompt": "R?", "answer": "Bar.", "role": "reference"},
    ]
    module = made(language_model_folder, formulation=Pointwise())
    file = written(tmp_path, rows)
    with pytest.warns(UserWarning, match="ask for the opposite") as caught:
        quiet_trainer(tmp_path, max_epochs=1).fit(module, data_of(file))
    (said,) = (str(w.message) for w in caught if "opposite" in str(w.message))
    assert said == (
        "1 of 3 records ask for the opposite of an earlier one of the same prompt; the first: "
        f"{file}, line 2: 'Foo.' has the role \"avoid\" (avoid); {file}, line 1: 'Foo.' has the "
        'role "prefer" (prefer). Take one of the two out; Relaxed(price=10) trains on both and '
        "leaves each in part."
    )
