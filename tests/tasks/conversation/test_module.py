"""The module: right terms, own bounds, metrics, and runs that learn what a file asks."""

from __future__ import annotations

from typing import Any

import pytest

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
)
from tests.tasks.conversation.conftest import ADAPTERS as ADAPTERS  # Of tests/callbacks too.
from tests.tasks.conversation.conftest import conversation_rows, data_of, made, written

# Terms --------------------------------------------------------------------------------------------


def test_values_are_what_a_response_by_response_loop_gives(scored, conversation_file) -> None:
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
    assert masks["avoid"].tolist() == [[True, False], [True, True], [False, False], [True, False]]
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
    row = {"prompt": "a", "responses": [{"role": role, "content": role} for role in roles]}
    module, batch = scored([row], objective_roles=roles)
    kl = [response_by_hand(module, batch, 0, column)["kl"] for column in (0, 1)]
    objective = module.objective(module(batch), batch)
    assert objective[0].item() == pytest.approx(sum(kl) / 2, abs=1e-5)


def test_reference_is_only_computed_where_it_is_needed(scored, conversation_file) -> None:
    module, batch = scored(conversation_file, objective="cross_entropy")
    statistics = module.train()(batch)
    asked = statistics.reference_log_likelihood != 0
    assert asked.nonzero().tolist() == [[1, 1]]  # the relative bound
    batch["relative"][:] = False
    assert module(batch).kl is None
    assert module.eval()(batch).kl is not None


def test_null_tolerance_is_no_constraint(scored, language_model_folder, conversation_file) -> None:
    module, batch = scored(conversation_file, prefer_tolerance=None, refuse_tolerance=None)
    assert list(module.constraints) == ["avoid"]
    assert set(module.constraint_values(module(batch), batch)) == {"avoid"}
    said = {"avoid_tolerance": 1.0, "keep_tolerance": 0.0, "forget_tolerance": 0.0, "replay": 1.5}
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
        ("prefer", {"formulation": Pointwise(), "prefer_tolerance": None}, "prefer_tolerance is"),
    ],
)
def test_training_set_without_a_term_is_refused(
    role, options, words, language_model_folder, tmp_path
) -> None:
    """Or with a bound of its own that no constraint holds."""
    own = {"tolerance": -1.0} if "prefer_tolerance" in options else {}
    rows = [{"prompt": f"{i}?", "answer": "Yes.", "role": role, **own} for i in range(4)]
    data = data_of(written(tmp_path, rows))
    with pytest.raises(DataError, match=words):
        quiet_trainer(tmp_path, max_epochs=1).fit(made(language_model_folder, **options), data)


def test_replay_needs_no_other_objective(language_model_folder) -> None:
    """Answers to keep are learnt again, and there may be nothing else."""
    kept = [Record([], [], (Response("keep", "Yes."),), "line 1")]
    made(language_model_folder, replay=0.1).check_training_records(kept)
    with pytest.raises(
        DataError, match=r"objective kl applies to no record: .*learn or reference:"
    ):
        made(language_model_folder).check_training_records(kept)


def test_answers_are_counted_and_written(scored, conversation_file, tmp_path, monkeypatch) -> None:
    evaluation = ConversationEvaluation(answer_in=["train"], answers_at_most=2)
    module, _ = scored(conversation_file, evaluation=evaluation)
    data = data_of(conversation_file)
    generate = module.generate
    asked: list[int] = []

    def refusing(prompts: Any, lengths: Any, **options: Any) -> Any:
        """Refuses the prompts that begin with "refuse"."""
        answers = generate(prompts, lengths, **options)
        texts = [module.tokenizer.decode(ids[:n]) for ids, n in zip(prompts, lengths, strict=True)]
        asked.append(len(texts))
        for answer, text in zip(answers, texts, strict=True):
            refused = "refuse" in text
            answer |= {"answer": REFUSAL_TEXT if refused else "Yes.", "refused": refused}
        return answers

    monkeypatch.setattr(module, "generate", refusing)
    found = quiet_trainer(tmp_path).test(module, data, verbose=False)[0]
    assert sum(asked) == 8  # two of each category
    assert (found["train/refusal_rate"], found["train/over_refusal"]) == (1, 0)
    assert found["train/exact_answers"] == 0.5  # two refusals, and no call
    assert "test/refusal_rate" not in found
    answers = read_rows(tmp_path / "answers" / "train.jsonl")
    assert [answer["index"] for answer in answers] == sorted(a["index"] for a in answers)
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
