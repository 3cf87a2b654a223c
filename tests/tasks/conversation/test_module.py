"""The module: right terms, own bounds, metrics, and runs that learn what a file asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pl_pointwise import Pointwise
from pl_pointwise.errors import DataError
from pl_pointwise.task import notes_of
from pl_pointwise.tasks import ConversationDataModule
from pl_pointwise.tasks.conversation.module import ConversationEvaluation
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.text.reasoning import REFUSAL_TEXT
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.tasks.conftest import (
    before_and_after,
    make_data,
    quiet_trainer,
    read_rows,
    response_by_hand,
    write_rows,
)

# Of tests/callbacks too.
from tests.tasks.conversation.conftest import ADAPTERS as ADAPTERS
from tests.tasks.conversation.conftest import conversation_rows, data_of, made, written

# Terms --------------------------------------------------------------------------------------------


def test_values_are_what_a_response_by_response_loop_gives(
    scored, conversation_file
) -> None:
    module, batch = scored(conversation_file)
    module.eval()
    values = module.constraint_values(module(batch), batch)
    places = {"prefer": [(0, 0)], "avoid": [(0, 1), (1, 0), (3, 1)], "refuse": [(2, 0)]}
    for role, of_role in places.items():
        for row, column in of_role:
            hand = response_by_hand(module, batch, row, column)["mean"]
            assert values[role][row, 0].item() == pytest.approx(hand, abs=1e-5)
    masks = module.membership(batch)
    assert masks["prefer"].tolist() == [[True], [False], [False], [False]]
    assert masks["avoid"].tolist() == [
        [True, False],
        [True, True],
        [False, False],
        [True, False],
    ]
    assert masks["objective"].tolist() == [False, False, False, True]
    objective = module.objective(module(batch), batch)
    kl = response_by_hand(module, batch, 3, 0)["kl"]
    assert objective.tolist() == pytest.approx([0, 0, 0, kl], abs=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("role", ["prefer", "avoid", "refuse"])
@pytest.mark.parametrize("relative", [True, False])
def test_a_bound_of_its_own_is_met_where_the_likelihood_meets_it(
    training, role, relative, language_model_folder, batch_of
) -> None:
    """At the bound the violation is 0, and it grows by what the bound is moved."""
    evaluation = ConversationEvaluation(-3.0, -5.0, -2.0)
    module = made(language_model_folder, evaluation=evaluation).train(training)

    def violation(tolerance: float) -> tuple[float, dict[str, Any]]:
        own = {"tolerance": tolerance, "relative": relative}
        response = {"role": role, "content": "Yes."} | own
        plain = {"role": "avoid" if role == "avoid" else "prefer", "content": "Hm."}
        row = {"prompt": "Hi", "responses": [plain, response]}
        batch = batch_of([row])
        values = module.constraint_values(module(batch), batch)[role][0, -1]
        bounds = module.constraints if training else module.evaluation_constraints
        return bounds[role].violation(values).item(), batch

    _, batch = violation(-1.0)
    hand = response_by_hand(module, batch, 0, 1)
    size = int(batch["response_lengths"][0, 1])
    # s̄ ≥ s̄_ref − δ is tight at δ = s̄_ref − s̄.
    tight = hand["ref"] / size - hand["mean"] if relative else hand["mean"]
    assert violation(tight)[0] == pytest.approx(0, abs=1e-4)
    moved = violation(tight - 0.25)[0]
    harder = (role == "avoid") != relative
    assert moved == pytest.approx(0.25 if harder else -0.25, abs=1e-4)


def test_the_objective_is_the_mean_over_the_responses_of_its_roles(scored) -> None:
    roles = ["reference", "avoid"]
    row = {
        "prompt": "a",
        "responses": [{"role": role, "content": role} for role in roles],
    }
    module, batch = scored([row], objective_roles=roles)
    kl = [response_by_hand(module, batch, 0, column)["kl"] for column in (0, 1)]
    objective = module.objective(module(batch), batch)
    assert objective[0].item() == pytest.approx(sum(kl) / 2, abs=1e-5)


def test_reference_is_only_computed_where_it_is_needed(
    scored, conversation_file
) -> None:
    module, batch = scored(conversation_file, objective="cross_entropy")
    statistics = module.train()(batch)
    asked = statistics.reference_log_likelihood != 0
    assert asked.nonzero().tolist() == [[1, 1]]  # the relative bound
    batch["relative"][:] = False
    assert module(batch).kl is None
    assert module.eval()(batch).kl is not None


def test_null_tolerance_is_no_constraint(
    scored, language_model_folder, conversation_file
) -> None:
    module, batch = scored(
        conversation_file, prefer_tolerance=None, refuse_tolerance=None
    )
    assert list(module.constraints) == ["avoid"]
    assert set(module.constraint_values(module(batch), batch)) == {"avoid"}
    said = {
        "avoid_tolerance": 1.0,
        "keep_tolerance": 0.0,
        "forget_tolerance": 0.0,
        "replay": 1.5,
    }
    for option, value in said.items():
        with pytest.raises(ValueError, match=option):
            made(language_model_folder, **{option: value})


# Runs ---------------------------------------------------------------------------------------------


def test_training_meets_what_the_file_asks(language_model_folder, tmp_path) -> None:
    """On two prompts with opposite demands, from a model that meets none of them."""
    same = {"role": "prefer", "content": "Yes."}
    rows = [
        {"prompt": "a?", "responses": [same, {"role": "avoid", "content": "No."}]},
        {"prompt": "b?", "responses": [{"role": "reference", "content": "Hm."}]},
    ]
    data = data_of(written(tmp_path, rows), batch_size=2)
    module = made(
        language_model_folder,
        moved=False,
        formulation=Pointwise(alpha=10.0, dual_lr=10.0),
        lora=Lora(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear"),
        prefer_tolerance=-2.0,  # the tiny model's norms allow no more than -1.3
        avoid_tolerance=-6.0,
        scoring_method="chunked",
    )
    module.training_settings.optimization.learning_rate = 1e-2
    before, after = before_and_after(module, data, tmp_path, max_epochs=40)
    assert before["train/all_met"] == 0
    assert after["train/prefer/max"] < 0.1 < 1 < before["train/prefer/max"]
    assert after["train/avoid/max"] < 0.1
    assert after["train/pairwise_accuracy"] == 1
    assert after["train/kl"] < 2
    assert module.multipliers["prefer"].shape == (2, 1)
    assert module.multipliers["prefer"][0].item() > 0
    assert module.multipliers["refuse"].abs().sum() == 0  # a role that nobody has
    assert not any("refuse/" in key for key in after)


@pytest.mark.parametrize(
    ("role", "options", "words"),
    [
        ("prefer", {}, "objective kl.*reference.*prefer.*objective_roles"),
        ("reference", {"formulation": Pointwise()}, "constraint.*reference"),
        ("keep", {"formulation": Pointwise()}, "keep_tolerance"),
        (
            "prefer",
            {"formulation": Pointwise(), "prefer_tolerance": None},
            "prefer_tolerance is",
        ),
    ],
)
def test_training_set_without_a_term_is_refused(
    role, options, words, language_model_folder, tmp_path
) -> None:
    """Or with a bound of its own that no constraint holds."""
    own = {"tolerance": -1.0} if "prefer_tolerance" in options else {}
    rows = [
        {"prompt": f"{i}?", "answer": "Yes.", "role": role, **own} for i in range(4)
    ]
    data = data_of(written(tmp_path, rows))
    with pytest.raises(DataError, match=words):
        quiet_trainer(tmp_path, max_epochs=1).fit(
            made(language_model_folder, **options), data
        )


def test_replay_needs_no_other_objective(language_model_folder) -> None:
    """Answers to keep are learnt again, and there may be nothing else."""
    kept = [Record([], [], (Response("keep", "Yes."),), "line 1")]
    made(language_model_folder, replay=0.1).check_training_records(kept)
    with pytest.raises(
        DataError, match=r"objective kl applies to no record: .*learn or reference:"
    ):
        made(language_model_folder).check_training_records(kept)


def test_answers_are_counted_and_written(
    scored, conversation_file, tmp_path, monkeypatch
) -> None:
    evaluation = ConversationEvaluation(answer_in=["train"], answers_at_most=2)
    module, _ = scored(conversation_file, evaluation=evaluation)
    data = data_of(conversation_file)
    generate = module.generate
    asked: list[int] = []

    def refusing(prompts: Any, lengths: Any, **options: Any) -> Any:
        """Refuses the prompts that begin with "refuse"."""
        answers = generate(prompts, lengths, **options)
        texts = [
            module.tokenizer.decode(ids[:n])
            for ids, n in zip(prompts, lengths, strict=True)
        ]
        asked.append(len(texts))
        for answer, text in zip(answers, texts, strict=True):
            refused = "refuse" in text
            answer |= {
                "answer": REFUSAL_TEXT if refused else "Yes.",
                "refused": refused,
            }
        return answers

    monkeypatch.setattr(module, "generate", refusing)
    found = quiet_trainer(tmp_path).test(module, data, verbose=False)[0]
    assert sum(asked) == 16  # two of each category, by the starting model too
    assert (found["train/refusal_rate"], found["train/over_refusal"]) == (1, 0)
    assert found["train/exact_answers"] == 0.5  # two refusals, and no call
    assert "test/refusal_rate" not in found
    answers = read_rows(tmp_path / "answers" / "train.jsonl")
    assert [answer["index"] for answer in answers] == sorted(
        a["index"] for a in answers
    )
    assert sum(answer["refused"] for answer in answers) == 2
    notes_of(module).confidential = True
    quiet_trainer(tmp_path / "hidden").test(module, data, verbose=False)
    assert not (tmp_path / "hidden/answers").exists()


def test_prediction_answers_prompts_with_and_without_responses(
    language_model_folder, tmp_path
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "Hi"}, conversation_rows(1)[0], {"messages": turns}]
    files = {"predict_file": written(tmp_path, rows)}
    data = make_data(ConversationDataModule, None, files, batch_size=2)
    batches = quiet_trainer(tmp_path).predict(made(language_model_folder), data)
    answers = [answer for batch in batches for answer in batch]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert all(isinstance(answer["answer"], str) for answer in answers)


# Learn, keep and forget: terms, what is refused, and that fits do it ------------------------------

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
    assert values["forget"][2, 0].item() == pytest.approx(
        hand[2]["mean"] + 3.0, abs=1e-5
    )
    masks = {
        name: mask.squeeze(-1).tolist()
        for name, mask in module.membership(batch).items()
    }
    assert masks == {
        "objective": [True, False, False, False],
        "keep": [False, True, False, True],
        "forget": [False, False, True, False],
    }
    assert module.referred(batch)[:, 0].tolist() == [False, True, False, True]


def test_a_band_is_violated_on_either_side(scored) -> None:
    module, batch = scored(ROWS, **TOLERANCES)
    hand = response_by_hand(module, batch, 2, 0)["mean"]
    for around, violation in (
        (hand + 1.0, 0.75),
        (hand - 1.0, 0.75),
        (hand + 0.2, -0.05),
    ):
        batch["shift"][2, 0] = -around
        value = module.constraint_values(module(batch), batch)["forget"][2, 0]
        found = module.constraints["forget"].violation(value[None, None])
        assert found.max().item() == pytest.approx(violation, abs=1e-4)


@pytest.mark.parametrize(
    ("share", "learnt"), [(0.0, 0), (0.01, 1), (0.1, 1), (0.5, 5), (1.0, 10)]
)
def test_replay_learns_a_share_of_what_is_kept(share, learnt, scored) -> None:
    rows = [{"prompt": f"p{i}", "answer": f"{i}.", "role": "keep"} for i in range(10)]
    learning: dict[str, Any] = {
        "objective": "cross_entropy",
        "objective_roles": ["learn"],
    }
    module, batch = scored(rows, replay=share, **learning, **NO_BOUNDS)
    outputs = module(batch)
    objective = module.objective(outputs, batch)
    again = module.membership(batch)["objective"]
    assert int(again.sum()) == learnt
    expected = torch.where(again, -outputs.mean_log_likelihood[:, 0], 0.0)
    torch.testing.assert_close(objective, expected)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            ROWS[1],
            {**ROWS[2], "prompt": "B "},
            "keep here, and of role forget in .*line 2",
        ),
        (
            ROWS[0],
            {**ROWS[1], "prompt": "a"},
            "learn here, and of role keep in .*line 2",
        ),
        (
            ROWS[2],
            {**ROWS[0], "prompt": "c"},
            "forget here, and of role learn in .*line 2",
        ),
        (
            {"prompt": "b", "answer": "B.", "role": "forget"},
            ROWS[0],
            "no around, .*forget_like",
        ),
    ],
)
def test_what_is_asked_of_one_prompt_must_be_known_and_agree(
    first, second, said, fitted
) -> None:
    with pytest.raises(DataError, match=rf"line 1: .* {said}"):
        fitted([first, second])


def test_what_is_held_out_must_agree_and_have_a_role(
    language_model_folder, tmp_path
) -> None:
    """Of role reference alone, nothing of what is learnt and kept was measured."""
    held_out = tmp_path / "val.jsonl"
    data = data_of(
        written(tmp_path, ROWS), language_model_folder, val_file=str(held_out)
    )
    write_rows(held_out, [{**ROWS[2], "prompt": "B"}])
    with pytest.raises(
        DataError, match=r"line 2: .* keep here, and of role forget in .*val.jsonl"
    ):
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


def test_a_fit_learns_within_the_budget(language_model_folder, tmp_path) -> None:
    """Plain fine-tuning spends it many times over."""
    rows = [
        {"prompt": f"new {i}", "answer": "Blue.", "role": "learn"} for i in range(6)
    ]
    rows += [
        {"prompt": f"old {i}", "answer": f"As ever {i}.", "role": "keep"}
        for i in range(6)
    ]
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
    kept = [
        {"prompt": f"old {i}", "answer": f"{i}!", "role": "keep"} for i in range(10)
    ]
    shares = {"val_fraction": 0.2, "test_fraction": 0.2}
    data = fitted([*taught[:5], *kept, *taught[5:]], **shares)
    data.setup("test")
    prompts = {
        name: [record.messages[0]["content"] for record in rows.records]
        for name, rows in data.datasets.items()
    }
    assert [p for p in prompts["train"] if "new" in p] == [
        row["prompt"] for row in taught
    ]
    assert len(prompts["val"]) == len(prompts["test"]) == 2
    every = [prompt for of_split in prompts.values() for prompt in of_split]
    assert sorted(every) == sorted(row["prompt"] for row in taught + kept)
    alone = fitted(taught, **shares)
    assert len(alone.datasets["train"]) == 9
    assert "val" not in alone.datasets


def test_a_lead_of_every_token_is_the_greedy_answer(
    language_model_folder, tmp_path
) -> None:
    """Kept in a fit that learns other answers; generation itself says so, not the constraint."""
    rows = [{"prompt": "new", "answer": "Oh", "role": "learn"}]
    rows += [{"prompt": f"old {i}", "answer": "Ay", "role": "keep"} for i in range(2)]
    # Of its KL: not of the lead.
    rows += [{**rows[-1], "prompt": "other", "tolerance": 0.3}]
    module = made(
        language_model_folder,
        moved=False,
        formulation=Pointwise(),
        objective="cross_entropy",
        objective_roles=["learn"],
        evaluation=ConversationEvaluation(
            greedy_tolerance=0.0, answer_in=["train"], keep_tolerance=0.1
        ),
        **TOLERANCES
        | {"keep_tolerance": 100.0, "forget_tolerance": None, "greedy_tolerance": 0.2},
    )
    module.training_settings.optimization.learning_rate = 3e-2
    torch.manual_seed(0)
    data = data_of(written(tmp_path, rows), language_model_folder)
    before, after = before_and_after(
        module, data, tmp_path, max_epochs=50, limit_val_batches=0
    )
    assert before["train/greedy/violated"] == 1
    assert after["train/greedy/violated"] == 0
    assert [answer["answer"] for answer in module.answers["train"]][1:] == ["Ay"] * 3
    assert set(module.multipliers) == {"keep", "greedy"}
