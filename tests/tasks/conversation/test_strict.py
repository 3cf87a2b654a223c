"""A module judged by generated answers: λ, violations and rates follow them, the weights do not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pl_pointwise import Pointwise
from pl_pointwise.errors import TrainingError
from pl_pointwise.tasks import SafetyModule, When2CallDataModule, When2CallModule
from pl_pointwise.tasks.conversation.module import DEFAULT_TRAINING, ConversationEvaluation
from pl_pointwise.tasks.language_model.generation import Generation
from pl_pointwise.tasks.language_model.strict import Strict
from tests.pl_pointwise.toy import At
from tests.tasks.conftest import make_data, make_module, quiet_trainer
from tests.tasks.conversation.conftest import CALL, TOOL, write_rows
from tests.tasks.conversation.test_module import ADAPTERS, data_of, made
from tests.tasks.when2call.conftest import preference_rows

WRITTEN = f"<tool_call>{json.dumps(CALL)}</tool_call>"
ASKED = ("works 0", "works 1", "fails 2", "fails 3")


def rows() -> list[dict[str, Any]]:
    """Two prompts that are answered by a call, two that are not, and two answers in words."""
    turns = [[{"role": "user", "content": ask}] for ask in ASKED]
    call = [{"role": "prefer", "tool_calls": [CALL]}, {"role": "avoid", "content": "No."}]
    found = [{"messages": turn, "tools": [TOOL], "responses": call} for turn in turns]
    words = [{"role": "prefer", "content": "Yes."}, {"role": "reference", "content": "So."}]
    return found + [{"prompt": f"words {i}", "responses": words} for i in range(2)]


class Scripted:
    """Stands for generation: answers by the prompt's first word, and counts what it was asked."""

    def __init__(self, module: Any) -> None:
        self.tokenizer, self.asked = module.tokenizer, list[str]()

    def __call__(self, prompts: Any, lengths: Any, **_: Any) -> Any:
        texts = [self.tokenizer.decode(p[:n]) for p, n in zip(prompts, lengths, strict=True)]
        self.asked += texts
        answers = [WRITTEN if "works" in text else "I think so." for text in texts]
        return SimpleNamespace(texts=answers, cut=[False] * len(texts))


def judged(folder: Path, monkeypatch: Any, strict: Strict, **options: Any) -> tuple[Any, Scripted]:
    room = Generation(max_new_tokens=200)  # A token a byte.
    options = {"formulation": Pointwise(alpha=1.0, dual_lr=0.5), "generation": room} | options
    module = made(folder, moved=False, judged_by=strict, **options)
    script = Scripted(module)
    monkeypatch.setattr(module, "generate", script)
    return module, script


@pytest.fixture(name="data")
def data_module(tmp_path: Path) -> Any:
    return data_of(str(write_rows(tmp_path / "rows.jsonl", rows())), batch_size=6)


def test_multipliers_follow_the_answers_and_the_weights_the_likelihood(
    language_model_folder, data, tmp_path, monkeypatch
) -> None:
    strict = Strict({"prefer": "tool_call"}, margin=2.0)
    module, script = judged(language_model_folder, monkeypatch, strict)
    plain = made(language_model_folder, moved=False, formulation=Pointwise(alpha=1.0, dual_lr=0.5))
    for each in (module, plain):
        torch.manual_seed(2)
        quiet_trainer(tmp_path, max_steps=1).fit(each, data)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(script.asked) == 4  # The preferred answers in words speak for themselves.
    found, likelihood = module.multipliers["prefer"][:, 0], plain.multipliers["prefer"][:, 0]
    assert found[:4].tolist() == pytest.approx([0, 0, 1, 1])  # .5 · 2 where the answer is no call
    assert torch.equal(found[4:], likelihood[4:])
    assert torch.equal(module.multipliers["avoid"], plain.multipliers["avoid"])
    assert not set(found[2:4].tolist()) & set(likelihood[2:4].tolist())


def test_an_answer_to_avoid_must_not_be_of_its_kind(
    language_model_folder, tmp_path, monkeypatch
) -> None:
    """s̄ ≤ ε of a call: violated where the answer is one; and refusals by their rule."""
    avoid = [{"role": "avoid", "tool_calls": [CALL]}, {"role": "reference", "content": "No."}]
    refusal = [{"role": "refuse"}, {"role": "reference", "content": "Yes."}]
    given = [
        {"prompt": ask, "tools": [TOOL], "responses": avoid} for ask in ("works 0", "fails 1")
    ] + [{"prompt": "works 2", "responses": refusal}]
    data = data_of(str(write_rows(tmp_path / "rows.jsonl", given)))
    strict = Strict({"avoid": "tool_call", "refuse": "refusal"})
    module, _ = judged(language_model_folder, monkeypatch, strict)
    quiet_trainer(tmp_path).test(module, data, verbose=False)
    found = module.evaluated["train"]
    assert found["avoid"].violation[:, 0].tolist() == [1, -1]
    assert found["refuse"].violation[:, 0].tolist() == [1]


def test_reports_follow_the_answers(language_model_folder, data, tmp_path, monkeypatch) -> None:
    evaluation = ConversationEvaluation(prefer_tolerance=-9.0, answer_in=["train"])
    strict = Strict({"prefer": "tool_call"})
    options = {"evaluation": evaluation, "avoid_tolerance": None}
    module, script = judged(language_model_folder, monkeypatch, strict, **options)
    found = quiet_trainer(tmp_path).test(module, data, verbose=False)[0]
    violation = module.evaluated["train"]["prefer"].violation[:, 0]
    assert violation[:4].tolist() == [-1, -1, 1, 1]
    assert found["train/prefer/violated"] == pytest.approx(2 / 6)
    assert found["train/all_met"] == pytest.approx(4 / 6)
    assert len(script.asked) == 6  # Once each: those of the strict values are those written.
    for name in ("valid_calls", "existing_tool", "right_tool"):
        assert found[f"train/{name}"] == 0.5
    lines = (tmp_path / "answers" / "train.jsonl").read_text().splitlines()
    told = [json.loads(line).get("valid_call") for line in lines]
    assert told == [True, True, False, False, None, None]


def test_answers_of_a_judged_batch_are_not_taken_for_another(
    language_model_folder, tmp_path, monkeypatch
) -> None:
    """A prediction after an evaluation writes the answers of its own prompts, in its order."""
    train = str(write_rows(tmp_path / "rows.jsonl", rows()))
    asked = [{"prompt": ask, "tools": [TOOL]} for ask in ("fails 8", "works 9")]
    asked_file = str(write_rows(tmp_path / "asked.jsonl", asked))
    data = data_of(train, batch_size=6, predict_file=asked_file)
    module, _ = judged(language_model_folder, monkeypatch, Strict({"prefer": "tool_call"}))
    trainer = quiet_trainer(tmp_path)
    trainer.test(module, data, verbose=False)
    batches = trainer.predict(module, data)
    assert batches is not None
    texts = [answer["answer"] for answers in batches for answer in answers]
    assert texts == ["I think so.", WRITTEN]


def test_answers_too_short_for_a_call_are_refused(
    language_model_folder, data, tmp_path, monkeypatch
) -> None:
    tokens = len(WRITTEN)
    options = {"generation": Generation(max_new_tokens=tokens - 1)}
    strict = Strict({"prefer": "tool_call"})
    module, _ = judged(language_model_folder, monkeypatch, strict, **options)
    told = f"tests.prefer: the tool call of sample . has {tokens} tokens.* cut after {tokens - 1},"
    with pytest.raises(TrainingError, match=told):
        quiet_trainer(tmp_path, max_steps=1).fit(module, data)
    options = {"generation": Generation(max_new_tokens=tokens)}
    module, _ = judged(language_model_folder, monkeypatch, strict, **options)
    quiet_trainer(tmp_path, max_steps=1).fit(module, data)


@pytest.mark.parametrize("at", [1, 2])
def test_between_two_answers_the_last_one_stands_also_after_a_resume(
    at, language_model_folder, data, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "run.ckpt"
    strict = Strict({"prefer": "tool_call"}, every_n_epochs=3)
    module, script = judged(language_model_folder, monkeypatch, strict)
    save = At(at, lambda trainer: trainer.save_checkpoint(path))
    quiet_trainer(tmp_path, max_epochs=4, callbacks=[save]).fit(module, data)
    assert len(script.asked) == 8  # in epochs 0 and 3
    assert module.multipliers["prefer"][:4, 0].tolist() == [0, 0, 2, 2]
    resumed, again = judged(language_model_folder, monkeypatch, strict)
    quiet_trainer(tmp_path, max_epochs=4).fit(resumed, data, ckpt_path=path)
    assert len(again.asked) == 4
    for ours, theirs in zip(module.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(resumed.multipliers["prefer"], module.multipliers["prefer"])
    quiet_trainer(tmp_path, max_epochs=1).fit(resumed, data)
    assert len(again.asked) == 8  # Another fit starts anew.


def test_a_damaged_table_is_refused_by_name(
    language_model_folder, data, tmp_path, monkeypatch
) -> None:
    strict = Strict({"prefer": "tool_call"}, every_n_epochs=2)
    module, _ = judged(language_model_folder, monkeypatch, strict)
    runner = quiet_trainer(tmp_path, max_epochs=1)
    runner.fit(module, data)
    runner.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    checkpoint["strict_values"]["prefer"] = [1, 2]
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    with pytest.raises(TrainingError, match="no usable 'strict_values'"):
        quiet_trainer(tmp_path, max_epochs=2).fit(module, data, ckpt_path=tmp_path / "bad.ckpt")


def long_answers(answer: str, record: Any) -> bool:
    return len(answer) > 1000 and bool(record.messages)


def test_a_function_is_asked_and_no_checkpoint_holds_it(
    language_model_folder, data, tmp_path, monkeypatch
) -> None:
    module, script = judged(language_model_folder, monkeypatch, Strict({"prefer": long_answers}))
    runner = quiet_trainer(tmp_path, max_epochs=1)
    runner.fit(module, data)
    assert not script.asked  # No preferred response is of that kind.
    runner.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(TrainingError, match=r"does not hold judged_by \(.*function.*Give it again"):
        type(module).load_from_checkpoint(tmp_path / "run.ckpt")
    again = type(module).load_from_checkpoint(
        tmp_path / "run.ckpt", judged_by=Strict({"prefer": long_answers})
    )
    assert again.strict_tests.settings.tests == {"prefer": long_answers}


def test_unknown_constraint_is_refused_by_name(language_model_folder) -> None:
    with pytest.raises(ValueError, match=r"judged_by\.tests names 'chosen'.*'prefer', 'avoid'"):
        made(language_model_folder, judged_by=Strict({"chosen": "tool_call"}))


def test_generation_in_a_fit_changes_nothing_but_the_multipliers(
    language_model_folder, data, tmp_path
) -> None:
    """With dropout and real generation: the weights of the first step, the modes, the draws."""
    weights = []
    for strict in (None, Strict({"prefer": "tool_call"})):
        torch.manual_seed(4)
        lora = {**vars(ADAPTERS), "lora_dropout": 0.3}
        options = {"judged_by": strict, "generation": Generation(max_new_tokens=len(WRITTEN))}
        module = made(language_model_folder, lora=lora, micro_batch_size=2, **options)
        quiet_trainer(tmp_path, max_epochs=2).fit(module, data)
        assert all(part.training for part in module.modules())
        weights.append([p.detach().clone() for p in module.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        assert torch.equal(ours, theirs)  # Without formulations no λ pulls.


def test_when2call_and_safety_know_which_responses_their_constraints_are_of(
    language_model_folder, tmp_path
) -> None:
    file = str(write_rows(tmp_path / "pref.jsonl", preference_rows(4)))
    module = make_module(
        When2CallModule,
        language_model_folder,
        DEFAULT_TRAINING,
        True,
        lora=ADAPTERS,
        judged_by=Strict({"chosen": "tool_call", "rejected": "tool_call"}),
    )
    data = make_data(
        When2CallDataModule, language_model_folder, {"train_file": file}, val_fraction=0.0
    )
    data.setup("fit")
    train = data.datasets["train"]
    batch = data.collate([train[i] | {"index": i} for i in range(len(train))])
    values = module.constraint_values(module(batch), batch)
    responses = module.constrained_responses(batch)
    assert {n: r.shape for n, r in responses.items()} == {n: v.shape for n, v in values.items()}
    assert responses["chosen"].tolist() == [0] * len(train)
    strict = module.strict_values(module(batch), batch)
    tested = strict["chosen"] != values["chosen"]
    calls = [not isinstance(r.answers[0], str) for r in batch["records"]]
    assert any(calls)
    assert tested.tolist() == calls

    safety = make_module(
        SafetyModule, language_model_folder, DEFAULT_TRAINING, False, lora=ADAPTERS
    )
    roles = torch.tensor([[0, 1], [1, -1], [-1, -1]])
    found = safety.constrained_responses({"roles": roles})
    from pl_pointwise.tasks.safety.records import REFUSAL

    expected = [next((c for c, r in enumerate(row) if r == REFUSAL), -1) for row in roles.tolist()]
    assert found["refuse"].tolist() == found["comply"].tolist() == expected
