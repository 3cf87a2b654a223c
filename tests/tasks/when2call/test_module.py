"""The module: right terms, right baselines, light checkpoints, an export that scores the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer, seed_everything
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor

from pl_pointwise import Optimization, Penalty, Pointwise
from pl_pointwise.tasks import Policy, When2CallDataModule, When2CallModule
from pl_pointwise.tasks.language_model.likelihood.preference_losses import (
    PreferenceLosses,
    cal_dpo_loss,
    cpo_loss,
    dpo_loss,
    simpo_loss,
)
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.generation import Generation
from pl_pointwise.tasks.when2call.data import CATEGORIES
from pl_pointwise.tasks.when2call.module import (
    DIRECT,
    PAPER_TRAINING,
    choice_metrics,
    chosen_categories,
    update_choice_metrics,
)
from tests.tasks.conftest import (
    ADAPTERS,
    before_and_after,
    make_data,
    make_module,
    quiet_trainer,
    random_batch,
    response_by_hand,
)


@pytest.fixture
def made(language_model_folder: Path) -> Callable[..., When2CallModule]:
    """made(moved=True, **options) → a module on the tiny Llama, with moved adapters."""

    def make(moved: bool = True, **options: Any) -> When2CallModule:
        options = {"lora": ADAPTERS} | options
        return make_module(
            When2CallModule, language_model_folder, PAPER_TRAINING, moved, **options
        )

    return make


def batch_of(seed: int = 0) -> dict[str, Any]:
    """Three prompts; the second has one rejected response fewer."""
    return random_batch((5, 9, 7), ((4, 6, 3), (2, 8), (7, 3, 5)), seed)


def data_of(files: dict[str, str], **options: Any) -> When2CallDataModule:
    """Data for whatever model they are used with."""
    options = {"group_rejected": True, "batch_size": 4} | options
    return make_data(When2CallDataModule, None, files, **options)


# Terms --------------------------------------------------------------------------------------------


def test_objective_and_constraints_are_what_a_response_by_response_loop_gives(
    made,
) -> None:
    module, batch = made(), batch_of()
    outputs = module(batch)
    objective = module.objective(outputs, batch)
    values, members = module.constraint_values(outputs, batch), module.membership(batch)
    assert members["rejected"].tolist() == [[True, True], [True, False], [True, True]]
    for row in range(3):
        columns = [0] + [1 + k for k in range(2) if members["rejected"][row, k]]
        found = [response_by_hand(module, batch, row, column) for column in columns]
        mean_kl = sum(each["kl"] for each in found) / len(found)
        assert mean_kl > 1e-3  # guards the comparison: policy and reference do differ
        assert objective[row].item() == pytest.approx(mean_kl, rel=1e-4)
        assert values["chosen"][row].item() == pytest.approx(found[0]["mean"], rel=1e-5)
        for k in range(len(columns) - 1):
            rejected = values["rejected"][row, k].item()
            assert rejected == pytest.approx(found[k + 1]["mean"], rel=1e-5)


def test_the_ratio_constraint_compares_the_two_of_each_pair(made) -> None:
    module, batch = made(constrain="ratio", ratio_tolerance=0.5), batch_of()
    outputs = module(batch)
    ratio = module.constraint_values(outputs, batch)["ratio"]
    means = outputs.mean_log_likelihood
    carried = module.membership(batch)["ratio"]
    assert torch.equal(ratio[carried], (means[:, :1] - means[:, 1:])[carried])
    assert module.membership(batch)["ratio"].tolist()[1] == [True, False]
    assert list(module.constraints) == ["ratio"]
    assert module.constraints["ratio"].at_least == 0.5


def loss_of_pair(name: str, chosen: dict, rejected: dict) -> float:
    """Of s, s̄ and s_ref of the two."""
    (s_w, m_w, ref_w), (s_l, m_l, ref_l) = (
        [torch.tensor(each[key]) for key in ("s", "mean", "ref")]
        for each in (chosen, rejected)
    )
    losses = {
        "dpo": lambda: dpo_loss(s_w - ref_w, s_l - ref_l),
        "simpo": lambda: simpo_loss(m_w, m_l, gamma=0.3),
        "cpo": lambda: cpo_loss(s_w, s_l, m_w),
        "cal_dpo": lambda: cal_dpo_loss(s_w - ref_w, s_l - ref_l),
    }
    return losses[name]().item()


@pytest.mark.parametrize("name", ["dpo", "simpo", "cpo", "cal_dpo"])
def test_a_baseline_is_the_mean_of_its_formula_over_the_pairs(name, made) -> None:
    module = made(objective=name, losses=PreferenceLosses(simpo_gamma=0.3))
    batch = batch_of()
    found = module.objective(module(batch), batch)
    for row in range(3):
        each = [
            response_by_hand(module, batch, row, column)
            for column in range(3 - (row == 1))
        ]
        expected = [loss_of_pair(name, each[0], rejected) for rejected in each[1:]]
        assert found[row].item() == pytest.approx(
            sum(expected) / len(expected), rel=1e-4
        )


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_a_floor_holds_beside_a_preference_loss(name, made) -> None:
    options = {"objective": name, "constrain": "floor", "floor_tolerance": 0.1}
    module, batch = made(**options).train(), batch_of()
    outputs = module(batch)
    assert list(module.constraints) == ["floor"]
    assert module.constraints["floor"].at_most == 0.1
    found = module.constraint_values(outputs, batch)["floor"]
    for row in range(3):
        hand = response_by_hand(module, batch, row, 0)
        size = int(batch["response_lengths"][row, 0])
        assert found[row].item() == pytest.approx(
            hand["ref"] / size - hand["mean"], abs=1e-5
        )
    # SimPO needs the reference of the chosen responses alone.
    others = module.referred(batch)[:, 1:] & outputs.present[:, 1:]
    assert bool(others.any()) == (name == "dpo")


# Fit ----------------------------------------------------------------------------------------------


def test_training_makes_chosen_responses_likely_and_keeps_rejected_ones_unlikely(
    when2call_files, tmp_path, made
) -> None:
    seed_everything(0)
    module = made(
        moved=False,
        formulation=Pointwise(alpha=1.0, dual_lr=0.5),
        chosen_tolerance=-3.0,
        rejected_tolerance=-5.0,
        lora=Lora(
            target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        ),
        optimization=Optimization(learning_rate=1e-2),
        reference_cache="memory",
    )
    before, after = before_and_after(
        module, data_of(when2call_files), tmp_path, max_epochs=24
    )
    assert after["train/chosen/mean"] < before["train/chosen/mean"] - 1.5
    assert after["train/rejected/mean"] < 0.5
    assert after["train/pairwise_accuracy"] > before["train/pairwise_accuracy"] + 0.3
    assert after["train/kl"] > before["train/kl"] == pytest.approx(0, abs=1e-6)
    assert after["train/kl"] == pytest.approx(after["train/objective"])
    assert module.multipliers["chosen"].shape == (6, 1)
    assert module.multipliers["rejected"].shape == (6, 2)
    assert module.multipliers["rejected"].max() > 0
    assert module.scorer.method == "shared_prompt"
    assert module.scorer.cache


def test_the_model_trains_in_training_mode_whatever_it_was_left_in(
    language_model_folder, when2call_files, tmp_path
) -> None:
    """Lightning keeps the mode it finds, and from_pretrained leaves evaluation mode: no dropout."""

    class Watching(When2CallModule):
        seen = 0

        def objective(self, outputs: Any, batch: Any) -> Tensor:
            if self.trainer.training:
                assert all(
                    m.training for m in self.modules() if "Dropout" in type(m).__name__
                )
                Watching.seen += 1
            return super().objective(outputs, batch)

    module = Watching(Policy(str(language_model_folder)), Penalty(weight=1.0)).eval()
    data = data_of(when2call_files)
    quiet_trainer(tmp_path, max_epochs=2).fit(module, data)
    assert Watching.seen == 4


def test_the_scoring_methods_are_compared_once_a_fit(
    when2call_files, tmp_path, monkeypatch, made
) -> None:
    calls = []
    choose = ResponseScorer.choose_method
    monkeypatch.setattr(
        ResponseScorer,
        "choose_method",
        lambda self, batch: calls.append(1) or choose(self, batch),
    )
    module = made(formulation=Penalty(weight=1.0))
    # A validation before it would compare too.
    for fits in (1, 2):
        trainer = quiet_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0)
        trainer.fit(module, data_of(when2call_files))
        assert len(calls) == fits


# Checkpoints and export ---------------------------------------------------------------------------


def test_resumed_equals_uninterrupted(when2call_files, tmp_path, made) -> None:
    """With dropout, so that resuming has chance to restore."""

    def fitted(
        epochs: int, checkpoint: Path | None = None
    ) -> tuple[When2CallModule, Trainer]:
        seed_everything(0)
        module = made(
            moved=False,
            formulation=Pointwise(alpha=1.0),
            lora=Lora(
                r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj", "o_proj"]
            ),
            optimization=Optimization(learning_rate=1e-3),
        )
        fit = quiet_trainer(tmp_path, max_epochs=epochs)
        fit.fit(
            module, data_of(when2call_files), ckpt_path=checkpoint, weights_only=True
        )
        return module, fit

    _, half = fitted(1)
    path = tmp_path / "half.ckpt"
    half.save_checkpoint(path)
    resumed, _ = fitted(3, path)
    whole, _ = fitted(3)
    for name in ("chosen", "rejected"):
        assert torch.equal(resumed.multipliers[name], whole.multipliers[name])
    assert whole.multipliers["rejected"].max() > 0
    for mine, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_checkpoint_of_other_adapters_is_refused(made) -> None:
    module = made()
    other = made(lora=Lora(r=4, lora_alpha=8, target_modules=["q_proj"]))
    adapters = {n: v for n, v in other.state_dict().items() if "lora_" in n}
    with pytest.raises(RuntimeError, match=r"missing model.*o_proj.*lora settings"):
        module.load_state_dict(adapters)
    adapters = {n: v for n, v in module.state_dict().items() if "lora_" in n}
    module.load_state_dict(adapters)
    with pytest.raises(RuntimeError, match=r"unexpected model\.spare"):
        module.load_state_dict(adapters | {"model.spare": torch.zeros(1)})


# Prediction ---------------------------------------------------------------------------------------


def test_a_question_is_answered_and_the_length_limit_told(made) -> None:
    module = made(generation=Generation(max_new_tokens=6)).eval()
    batch = batch_of()
    batch["response_lengths"] = torch.zeros(3, 0, dtype=torch.long)
    batch["index"] = torch.tensor([4, -1, 5])  # the second row only fills the batch
    expected = module.generate(batch["prompt_ids"], batch["prompt_lengths"])
    assert [each["cut"] for each in expected] == [True, True, True]
    assert module.predict_step(batch) == [
        {"index": index, **expected[row]} for row, index in ((0, 4), (2, 5))
    ]


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "ppo"}, "objective='ppo'"),
        ({"constrain": "x"}, "constrain='x'"),
        ({"quantize_4bit": True, "merge_on_export": True}, "be merged into them"),
    ],
)
def test_bad_option_is_refused_before_training(options, message, made) -> None:
    with pytest.raises(ValueError, match=message):
        made(**options)


# The table, whose numbers are sklearn's where sklearn has them, whatever the batches --------------

LABELS = range(len(CATEGORIES))
labelled = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30
)


def measured(gold: list[int], chosen: list[int], size: int = 30) -> dict[str, float]:
    """The table of these categories, updated with so many at a time."""
    metrics = choice_metrics()
    for rows in torch.arange(len(gold)).split(size):
        right, predicted = torch.tensor(gold)[rows], torch.tensor(chosen)[rows]
        by_name = dict.fromkeys(("sum", "characters", "tokens"), predicted)
        update_choice_metrics(metrics, rows, by_name, right)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


@given(labelled, st.integers(1, 7))
def test_the_table_equals_sklearns_whatever_the_batches(pairs, size) -> None:
    gold, chosen = (list(column) for column in zip(*pairs, strict=True))
    found = measured(gold, chosen, size)
    assert found["accuracy_sum"] == pytest.approx(accuracy_score(gold, chosen))
    by_category = f1_score(gold, chosen, labels=LABELS, average=None, zero_division=0)
    for name, value in zip(CATEGORIES, by_category, strict=True):
        assert found[f"f1_{name}"] == pytest.approx(value)
    occurring = sorted(set(gold))
    expected = f1_score(
        gold, chosen, labels=occurring, average="macro", zero_division=0
    )
    assert found["macro_f1"] == pytest.approx(expected)
    assert found["hallucination"] == pytest.approx(chosen.count(DIRECT) / len(gold))


def test_each_accuracy_chooses_by_its_own_normalisation() -> None:
    sums = torch.tensor([[-4.0, -9.0, -20.0, -30.0]])
    tokens = torch.tensor([[1, 3, 4, 20]])
    characters = torch.tensor([[2, 3, 20, 20]])
    choices = torch.tensor([[3, 2, 1, 0]])  # the right one first
    predicted = chosen_categories(sums, tokens, characters, choices)
    chosen = {name: CATEGORIES[int(choice)] for name, choice in predicted.items()}
    assert chosen == {
        "sum": "cannot_answer",
        "characters": "tool_call",
        "tokens": "direct",
    }

    metrics = choice_metrics()
    gold = torch.tensor([3])
    update_choice_metrics(metrics, torch.tensor([0]), predicted, gold)
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    assert (found["accuracy_sum"], found["accuracy_characters"]) == (1, 0)
    assert found["accuracy_tokens"] == found["hallucination"] == 0


def test_absent_candidates_and_nan_are_never_chosen() -> None:
    sums = torch.tensor([[math.nan, -3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    tokens = torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0]])
    choices = torch.tensor([[0, 2, -1, -1], [-1, -1, -1, -1]])
    assert chosen_categories(sums, tokens, tokens, choices)["tokens"].tolist() == [2, 0]


def test_ties_take_the_first_category() -> None:
    sums, ones = (
        torch.tensor([[-1.0, -0.5, -0.5, -2.0]]),
        torch.ones(1, 4, dtype=torch.long),
    )
    for choices, first in ([0, 1, 2, 3], 1), ([3, 2, 1, 0], 1):
        chosen = chosen_categories(sums, ones, ones, torch.tensor([choices]))
        assert [each.tolist() for each in chosen.values()] == [[first]] * 3
