"""Constraints under the Trainer of transformers: the steps of a plain loop, and resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from pl_pointwise import Pointwise, PointwiseLoss
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.trainer import FILE, PointwiseTrainerMixin
from tests.pl_pointwise.test_loss import Loop
from tests.pl_pointwise.toy import CONSTRAINTS, PAIRS, ToyRows, initial_weights, stack

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(nn.Module):
    """The toy's model, as a trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        first, last = initial_weights()
        self.first, self.last = nn.Parameter(first), nn.Parameter(last)

    def forward(self, x: Tensor, y: Tensor, has: Any = None) -> Tensor:
        return torch.tanh(x @ self.first) @ self.last


class Constrained(PointwiseTrainerMixin, Trainer):
    """Notes the samples of every batch that is trained on."""

    seen: list[list[int]]

    def terms(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
        x, z = inputs["x"], model(inputs["x"], inputs["y"])
        masks = {name[4:]: inputs[name] for name in inputs if name.startswith("has_")}
        # In the order of the loop, in which autograd then adds.
        objective = (z - inputs["y"]).square()
        return objective, {"fit": z, "pair": z[:, None] * x[:, :PAIRS]}, masks

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if model.training:
            self.seen.append(inputs["index"].tolist())
        return super().compute_loss(model, inputs, *args, **options)


def trainer(
    folder: Path,
    rows: ToyRows,
    groups: Any = None,
    eval_groups: Any = None,
    **options: Any,
) -> Constrained:
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 4,
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "label_names": ["y"],
        **options,
    }
    made = Constrained(
        model=Net(),
        args=TrainingArguments(**arguments),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=stack,
        constraints=CONSTRAINTS,
        formulation=Pointwise(),
        groups=groups,
        eval_groups=eval_groups,
    )
    made.seen = []
    return made


@pytest.mark.parametrize(
    ("partial", "groups"), [(False, None), (True, None), (False, [0, 1, 2] * 4)]
)
def test_the_trainer_takes_the_steps_of_a_loop_to_the_bit(
    tmp_path: Path, partial: bool, groups: list[int] | None
) -> None:
    rows = ToyRows(12, partial=partial)
    found = trainer(tmp_path, rows, groups)
    found.train()
    loop = Loop(
        PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12, groups=groups), rows
    )
    for batch in found.seen:
        loop.step(batch)
    assert len(found.seen) == 12
    assert found.constrained.total_steps == 12
    assert torch.equal(found.model.first, loop.weights[0])
    tables = found.constrained.multipliers, loop.loss.multipliers
    torch.testing.assert_close(*tables, rtol=0, atol=0)
    assert all(table.any() for table in tables[0].values())


def test_an_evaluation_judges_the_mean_of_each_group(tmp_path: Path) -> None:
    rows, groups = ToyRows(12), torch.arange(12) % 3
    found = trainer(
        tmp_path, rows, groups, eval_groups=groups, per_device_eval_batch_size=5
    )
    logged = found.evaluate()
    with torch.no_grad():
        z = found.model(rows.x, rows.y)
    means = torch.stack([z[groups == group].mean() for group in range(3)])
    bound = CONSTRAINTS["fit"].at_most
    assert bound is not None
    assert logged["eval_fit/violated"] == pytest.approx(
        float((means > bound).double().mean())
    )
    assert logged["eval_fit/worst"] == pytest.approx(float(means.max()))
    alone = trainer(tmp_path, rows, groups, eval_groups=groups[:11])
    with pytest.raises(DataError, match="eval_groups: a whole number from 0"):
        alone.evaluate()


def test_accumulated_steps_are_one_step_of_the_multipliers(tmp_path: Path) -> None:
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    found = trainer(tmp_path, ToyRows(12), **halves)
    found.train()
    assert len(found.seen) == 24
    assert found.constrained.steps == 12


def test_a_run_resumes_with_its_multipliers_to_the_bit(tmp_path: Path) -> None:
    rows = ToyRows(12)
    whole = trainer(tmp_path, rows, save_strategy="steps", save_steps=5)
    whole.train()
    resumed = trainer(tmp_path, rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert torch.equal(resumed.model.first, whole.model.first)
    tables = resumed.constrained.multipliers, whole.constrained.multipliers
    torch.testing.assert_close(*tables, rtol=0, atol=0)
    (tmp_path / "checkpoint-5" / FILE).write_text("half")
    with pytest.raises(TrainingError, match="is damaged; nothing of it was run"):
        trainer(tmp_path, rows).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-5")
        )
    (tmp_path / "checkpoint-5" / FILE).unlink()
    with pytest.raises(TrainingError, match="has no multipliers"):
        trainer(tmp_path, rows).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-5")
        )
    other = trainer(tmp_path, ToyRows(9))
    with pytest.raises(TrainingError, match="belong to 12 samples"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_rows_of_a_stream_have_no_multipliers_of_their_own(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from (rows[i] for i in range(12))

        def __len__(self) -> int:
            return 12

    rows = ToyRows(12)
    found = trainer(tmp_path, Stream())  # type: ignore[arg-type]
    found.seen = Mock()
    found.compute_loss = partial(PointwiseTrainerMixin.compute_loss, found)  # type: ignore
    found.train()
    assert found.constrained.steps == 12
    assert not found.constrained.multipliers


def test_an_evaluation_shows_the_mean_objective_and_moves_nothing(
    tmp_path: Path,
) -> None:
    rows = ToyRows(12)
    found = trainer(tmp_path, rows)
    loss = found.evaluate()["eval_loss"]
    expected = (Net()(rows.x, rows.y) - rows.y).square().mean()
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert not found.constrained.multipliers


def test_a_batch_without_an_index_and_a_trainer_without_terms_are_refused(
    tmp_path: Path,
) -> None:
    found = trainer(tmp_path, ToyRows(12))
    found.data_collator = lambda rows: stack(
        [{k: r[k] for k in r if k != "index"} for r in rows]
    )
    found.compute_loss = partial(PointwiseTrainerMixin.compute_loss, found)  # type: ignore
    with pytest.raises(TrainingError, match='no "index"'):
        found.train()

    class Bare(PointwiseTrainerMixin, Trainer):
        """It says neither objective nor values."""

    with pytest.raises(TrainingError, match=r"Bare has no terms\(model, inputs\)"):
        Bare(model=Net(), constraints=CONSTRAINTS, formulation=Pointwise())


# What is shown -----------------------------------------------------------------------------------


def test_logs_say_how_the_requirements_stand(tmp_path: Path) -> None:
    """The loss grows while λ does; alone it looks like a run that diverges."""
    rows = ToyRows(12)
    found = trainer(tmp_path, rows, logging_strategy="epoch")
    found.train()
    logged = [entry for entry in found.state.log_history if "loss" in entry]
    assert len(logged) == 4
    history = found.constrained.history
    worst = history.last["fit"]
    assert logged[-1]["objective"] == pytest.approx(float(history.objective.mean()))
    assert logged[-1]["fit/violated"] == pytest.approx(
        float((worst > 0).float().mean())
    )
    assert logged[-1]["fit/worst"] == pytest.approx(
        CONSTRAINTS["fit"].value_at(float(worst.max())), rel=1e-5
    )
    largest = float(found.constrained.multipliers["fit"].abs().max())
    assert logged[-1]["fit/multiplier_max"] == pytest.approx(largest)


@pytest.mark.parametrize("partial", [False, True])
def test_an_evaluation_measures_the_requirements_by_hand(
    tmp_path: Path, partial: bool, capsys: Any
) -> None:
    rows = ToyRows(13, partial=partial)  # The last batch is smaller.
    found = trainer(tmp_path, rows, eval_strategy="epoch", per_device_eval_batch_size=5)
    found.train()
    metrics = found.evaluate()
    batch = stack([rows[index] for index in range(13)])
    has = {name[4:]: batch.pop(name) for name in [*batch] if name.startswith("has_")}
    with torch.no_grad():
        z = found.model(batch["x"], batch["y"])
        values = {"fit": z[:, None], "pair": z[:, None] * batch["x"][:, :PAIRS]}
        objective = (z - batch["y"]).square()
    carried = has.get("objective", torch.ones(13, dtype=torch.bool))
    assert metrics["eval_objective"] == pytest.approx(
        float(objective[carried].mean()), rel=1e-5
    )
    for name, ell in values.items():
        violation = CONSTRAINTS[name].violation(ell)
        mask = has.get(name, torch.ones(ell.shape, dtype=torch.bool))
        mask = (mask[:, None] if mask.dim() == 1 else mask).expand(ell.shape)
        mask = mask.repeat(1, CONSTRAINTS[name].sides)
        worst = violation.masked_fill(~mask, -torch.inf).amax(1)[mask.any(1)]
        assert metrics[f"eval_{name}/violated"] == pytest.approx(
            float((worst > 0).float().mean())
        )
        largest = CONSTRAINTS[name].value_at(float(worst.max()))
        assert metrics[f"eval_{name}/worst"] == pytest.approx(largest, rel=1e-5)
    shown = capsys.readouterr().out
    assert "After 16 steps" in shown
    assert "held out" in shown
    assert "of 13" in shown


def test_a_held_out_value_that_does_not_apply_is_not_its_samples_worst(
    tmp_path: Path,
) -> None:
    found = trainer(tmp_path, ToyRows(4))
    # Accelerate drops what fills up the last batch of the loader that another test ended with.
    found.accelerator.gather_for_metrics = lambda table: table
    pair = torch.tensor([[-9.0] + [0.5] * (PAIRS - 1)]).repeat(3, 1)
    applies = torch.ones(3, PAIRS, dtype=torch.bool)
    applies[:2, 0] = False
    applies[1] = False
    values = {"fit": torch.zeros(3, 1), "pair": pair}
    found._held_out = {}
    found._keep_held_out(torch.zeros(3), values, {"pair": applies})
    kept = torch.cat(found._held_out["pair"])
    constraint = CONSTRAINTS["pair"]
    assert kept[0] == constraint.violation(torch.tensor([0.5])).max()
    assert kept[1].isnan()
    assert kept[2] == constraint.violation(torch.tensor([-9.0])).max()
