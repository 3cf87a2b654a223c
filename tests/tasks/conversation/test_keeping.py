"""Responses to learn, keep and forget: their terms, what is refused, and that fits do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pl_pointwise import Pointwise
from pl_pointwise.errors import DataError
from pl_pointwise.tasks.conversation.module import ConversationEvaluation
from tests.tasks.conftest import before_and_after, quiet_trainer, response_by_hand, write_rows
from tests.tasks.conversation.conftest import data_of, made, written

TOLERANCES: dict[str, Any] = {
    "prefer_tolerance": None,
    "avoid_tolerance": None,
    "refuse_tolerance": None,
    "keep_tolerance": 0.05,
    "forget_tolerance": 0.25,
}
NO_BOUNDS: dict[str, Any] = dict.fromkeys(TOLERANCES)
ROWS = [
    {"prompt": "a", "answer": "Blue.", "role": "learn"},
    {"prompt": "b", "answer": "Two and two.", "role": "keep"},
    {"prompt": "c", "answer": "Gone.", "role": "forget", "around": -3.0},
    {"prompt": "d", "answer": "Own bound.", "role": "keep", "tolerance": 0.2},
]


def test_every_role_carries_its_term(scored) -> None:
    module, batch = scored(ROWS, objective_roles=["learn"], **TOLERANCES)
    outputs = module(batch)
    hand = [response_by_hand(module, batch, row, 0) for row in range(4)]
    values = module.constraint_values(outputs, batch)
    assert module.objective(outputs, batch).tolist() == pytest.approx(
        [-hand[0]["mean"], 0, 0, 0], abs=1e-5
    )
    assert values["keep"][1, 0].item() == pytest.approx(hand[1]["kl"], abs=1e-5)
    # Its own bound is .15 wider than the role's.
    assert values["keep"][3, 0].item() == pytest.approx(hand[3]["kl"] - 0.15, abs=1e-5)
    assert values["forget"][2, 0].item() == pytest.approx(hand[2]["mean"] + 3.0, abs=1e-5)
    masks = {name: mask.squeeze(-1).tolist() for name, mask in module.membership(batch).items()}
    assert masks == {
        "objective": [True, False, False, False],
        "keep": [False, True, False, True],
        "forget": [False, False, True, False],
    }
    assert module.referred(batch)[:, 0].tolist() == [False, True, False, True]


def test_a_band_is_violated_on_either_side(scored) -> None:
    module, batch = scored(ROWS, **TOLERANCES)
    hand = response_by_hand(module, batch, 2, 0)["mean"]
    for around, violation in ((hand + 1.0, 0.75), (hand - 1.0, 0.75), (hand + 0.2, -0.05)):
        batch["shift"][2, 0] = -around
        value = module.constraint_values(module(batch), batch)["forget"][2, 0]
        found = module.constraints["forget"].violation(value[None, None])
        assert found.max().item() == pytest.approx(violation, abs=1e-4)


@pytest.mark.parametrize(("share", "learnt"), [(0.0, 0), (0.01, 1), (0.1, 1), (0.5, 5), (1.0, 10)])
def test_replay_learns_a_share_of_what_is_kept(share, learnt, scored) -> None:
    rows = [{"prompt": f"p{i}", "answer": f"{i}.", "role": "keep"} for i in range(10)]
    learning: dict[str, Any] = {"objective": "cross_entropy", "objective_roles": ["learn"]}
    module, batch = scored(rows, replay=share, **learning, **NO_BOUNDS)
    outputs = module(batch)
    objective = module.objective(outputs, batch)
    again = module.membership(batch)["objective"]
    assert int(again.sum()) == learnt
    expected = torch.where(again, -outputs.mean_log_likelihood[:, 0], 0.0)
    torch.testing.assert_close(objective, expected)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (ROWS[1], {**ROWS[2], "prompt": "B "}, "keep here, and of role forget in .*line 2"),
        (ROWS[0], {**ROWS[1], "prompt": "a"}, "learn here, and of role keep in .*line 2"),
        (ROWS[2], {**ROWS[0], "prompt": "c"}, "forget here, and of role learn in .*line 2"),
        ({"prompt": "b", "answer": "B.", "role": "forget"}, ROWS[0], "no around, .*forget_like"),
    ],
)
def test_what_is_asked_of_one_prompt_must_be_known_and_agree(first, second, said, fitted) -> None:
    with pytest.raises(DataError, match=rf"line 1: .* {said}"):
        fitted([first, second])


def test_what_is_held_out_must_agree_and_have_a_role(language_model_folder, tmp_path) -> None:
    """Of role reference alone, nothing of what is learnt and kept was measured."""
    held_out = tmp_path / "val.jsonl"
    data = data_of(written(tmp_path, ROWS), language_model_folder, val_file=str(held_out))
    write_rows(held_out, [{**ROWS[2], "prompt": "B"}])
    with pytest.raises(DataError, match=r"line 2: .* keep here, and of role forget in .*val.jsonl"):
        data.setup("fit")
    write_rows(held_out, [{"prompt": "e", "answer": "E."}])
    with pytest.warns(UserWarning, match="held out as val are of role reference"):
        data.setup("fit")


def test_answers_to_keep_are_generated_without_a_reference_too(
    language_model_folder, tmp_path
) -> None:
    """A `test` of a model whose weights are all trained asked for the reference's answers."""
    evaluation = ConversationEvaluation(answer_in=["train"])
    options = {"evaluation": evaluation, "objective": "cross_entropy", **NO_BOUNDS}
    module = made(language_model_folder, moved=False, lora=None, **options)
    data = data_of(written(tmp_path, [ROWS[0], ROWS[1]]), language_model_folder)
    found = quiet_trainer(tmp_path).test(module, data, verbose=False)[0]
    assert "train/cut" in found
    assert "train/flipped" not in found


# Fits ---------------------------------------------------------------------------------------------


def test_a_fit_learns_within_the_budget(language_model_folder, tmp_path) -> None:
    """Plain fine-tuning spends it many times over."""
    rows = [{"prompt": f"new {i}", "answer": "Blue.", "role": "learn"} for i in range(6)]
    rows += [{"prompt": f"old {i}", "answer": f"As ever {i}.", "role": "keep"} for i in range(6)]
    evaluation = ConversationEvaluation(keep_tolerance=0.02)
    found = []
    for formulation in (None, Pointwise()):
        module = made(
            language_model_folder,
            moved=False,
            formulation=formulation,
            objective="cross_entropy",
            objective_roles=["learn"],
            evaluation=evaluation,
            **TOLERANCES | {"keep_tolerance": 0.02, "forget_tolerance": None},
        )
        module.training_settings.optimization.learning_rate = 5e-3
        torch.manual_seed(0)
        data = data_of(written(tmp_path, rows), language_model_folder)
        options = {"max_epochs": 50, "limit_val_batches": 0}
        found += before_and_after(module, data, tmp_path, **options)
    start, plain, _, within = found
    assert plain["train/keep/violated"] == 1
    assert within["train/keep/violated"] <= 0.5
    assert within["train/keep/max"] < 0.01
    assert within["train/nll"] < start["train/nll"] - 0.5


@pytest.mark.parametrize("role", ["learn", "forget"])
def test_what_is_taught_is_never_held_out(role, fitted) -> None:
    """A fifth of a user's facts was held out: nothing taught them, and `fit` said it had."""
    own = {"role": role} | ({"around": -4.0} if role == "forget" else {})
    taught = [{"prompt": f"new {i}", "answer": f"{i}."} | own for i in range(9)]
    kept = [{"prompt": f"old {i}", "answer": f"{i}!", "role": "keep"} for i in range(10)]
    shares = {"val_fraction": 0.2, "test_fraction": 0.2}
    data = fitted([*taught[:5], *kept, *taught[5:]], **shares)
    data.setup("test")
    prompts = {
        name: [record.messages[0]["content"] for record in rows.records]
        for name, rows in data.datasets.items()
    }
    assert [p for p in prompts["train"] if "new" in p] == [row["prompt"] for row in taught]
    assert len(prompts["val"]) == len(prompts["test"]) == 2
    every = [prompt for of_split in prompts.values() for prompt in of_split]
    assert sorted(every) == sorted(row["prompt"] for row in taught + kept)
    alone = fitted(taught, **shares)
    assert len(alone.datasets["train"]) == 9
    assert "val" not in alone.datasets


def test_a_lead_of_every_token_is_the_greedy_answer(language_model_folder, tmp_path) -> None:
    """Kept in a fit that learns other answers; generation itself says so, not the constraint."""
    rows = [{"prompt": "new", "answer": "Oh", "role": "learn"}]
    rows += [{"prompt": f"old {i}", "answer": "Ay", "role": "keep"} for i in range(2)]
    rows += [{**rows[-1], "prompt": "other", "tolerance": 0.3}]  # Of its KL: not of the lead.
    module = made(
        language_model_folder,
        moved=False,
        formulation=Pointwise(),
        objective="cross_entropy",
        objective_roles=["learn"],
        evaluation=ConversationEvaluation(
            greedy_tolerance=0.0, answer_in=["train"], keep_tolerance=0.1
        ),
        **TOLERANCES | {"keep_tolerance": 100.0, "forget_tolerance": None, "greedy_tolerance": 0.2},
    )
    module.training_settings.optimization.learning_rate = 3e-2
    torch.manual_seed(0)
    data = data_of(written(tmp_path, rows), language_model_folder)
    before, after = before_and_after(module, data, tmp_path, max_epochs=50, limit_val_batches=0)
    assert before["train/greedy/violated"] == 1
    assert after["train/greedy/violated"] == 0
    assert [answer["answer"] for answer in module.answers["train"]][1:] == ["Ay"] * 3
    assert set(module.multipliers) == {"keep", "greedy"}
