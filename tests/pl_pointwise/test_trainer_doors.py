"""A Trainer's edges: windows, checkpoints, evaluations, and what cannot be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.errors import TrainingError
from pl_pointwise.trainer import FILE, PointwiseTrainerMixin

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROWS = 16


class Rows(Dataset[Any]):
    def __init__(self, count: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 3, generator=generator)
        self.labels = self.x.sum(1) + 1
        self.applies = torch.rand(count, generator=generator) < 0.6

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, position: int) -> Any:
        names = ("x", "labels", "applies")
        return {name: getattr(self, name)[position] for name in names}


class Net(nn.Module):
    """It takes keyword arguments, as language models do: a trainer then leaves a loss undivided."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, labels: Any = None, **_: Any) -> Any:
        return {"logits": self.layers(x)[:, 0]}


class Constrained(PointwiseTrainerMixin, Trainer):
    masked = False

    def terms(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
        outputs = model(**inputs)["logits"]
        values = {"fit": (outputs - inputs["labels"]).abs()}
        masks = {"fit": inputs["applies"]} if self.masked else {}
        return outputs.square(), values, masks


class Masked(Constrained):
    """Its masks are known before a forward pass."""

    masked = True

    def masks(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return {"fit": inputs["applies"]}


class Objected(Constrained):
    """The objective applies to some rows alone."""

    def terms(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
        objective, values, _ = super().terms(model, inputs)
        objective = torch.where(inputs["applies"], objective, 1e6)
        return objective, values, {"objective": inputs["applies"]}


def made(
    folder: Path,
    rows: Any = None,
    kind: type[Constrained] = Constrained,
    groups: Any = None,
    formulation: Any = None,
    more: Any = None,
    **options: Any,
) -> Any:
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "remove_unused_columns": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        **options,
    }
    more = {} if more is None else more
    if "model_init" not in more:
        more = {"model": Net(), **more}
    rows = Rows() if rows is None else rows
    return kind(
        args=TrainingArguments(**arguments),
        train_dataset=rows,
        eval_dataset=rows,
        constraints={"fit": Constraint(at_most=0.2)},
        formulation=formulation or Pointwise(),
        groups=groups,
        **more,
    )


def weights_of(trainer: Any) -> list[Tensor]:
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def assert_alike(found: Any, expected: Any, bound: float = 0.0) -> None:
    pairs = zip(weights_of(found), weights_of(expected), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=bound)
    tables = (
        found.constrained.multipliers["fit"],
        expected.constrained.multipliers["fit"],
    )
    torch.testing.assert_close(*tables, rtol=0, atol=bound)
    assert tables[0].any()


# Windows -----------------------------------------------------------------------------------------

STATED = Pointwise(alpha=0.8, dual_lr=1.0)


@pytest.mark.parametrize(
    ("pieces", "older"), [(1, False), (2, False), (4, False), (2, True)]
)
def test_accumulated_micro_batches_train_as_one_batch(
    tmp_path: Path, pieces: int, older: bool
) -> None:
    """Below transformers 5.19 gradients were too large, by the number of micro-batches."""
    whole = made(tmp_path, formulation=STATED)
    whole.train()
    parts = made(
        tmp_path,
        formulation=STATED,
        per_device_train_batch_size=4 // pieces,
        gradient_accumulation_steps=pieces,
    )
    if older:  # What a trainer before 5.19 does not read.
        parts.loss_is_scaled_for_ga = None
    parts.train()
    assert_alike(parts, whole, 1e-5)
    assert parts.constrained.steps == 12


def test_masks_known_before_make_micro_batches_one_batch(tmp_path: Path) -> None:
    whole = made(tmp_path, kind=Masked, formulation=STATED)
    whole.train()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    parts = made(tmp_path, kind=Masked, formulation=STATED, **options)
    parts.train()
    assert_alike(parts, whole, 1e-5)


def test_masks_need_not_be_returned_by_terms_too(tmp_path: Path) -> None:
    """They were counted, and the terms applied to every sample all the same."""

    class Once(Masked):
        def terms(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
            return super().terms(model, inputs)[:2]

    twice = made(tmp_path, kind=Masked, formulation=STATED)
    twice.train()
    once = made(tmp_path, kind=Once, formulation=STATED)
    once.train()
    assert_alike(once, twice, 0.0)
    assert_equal_evaluations(once.evaluate(), twice.evaluate())


class Ranked(Constrained):
    """Its model and its collator know nothing of the column that says where the bound applies."""

    columns = ("applies",)

    def terms(self, model: Any, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
        assert inputs["applies"].dtype == torch.bool
        masks = {"fit": inputs.pop("applies")}
        return (*super().terms(model, inputs)[:2], masks)


def collate_of_a_model(rows: list[Any]) -> dict[str, Tensor]:
    assert all({*row} == {"x", "labels"} for row in rows)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_columns_reach_terms_past_the_collator(tmp_path: Path) -> None:
    """In training and evaluation, also where the trainer drops columns by the model's signature."""
    plain = made(tmp_path, kind=Masked, formulation=STATED)
    plain.train()
    rows = datasets.Dataset.from_list([*map(dict, Rows())]).with_format("torch")
    own = {"data_collator": collate_of_a_model}
    found = made(
        tmp_path, rows, Ranked, formulation=STATED, more=own, remove_unused_columns=True
    )
    found.train()
    assert_alike(found, plain, 0.0)
    assert_equal_evaluations(found.evaluate(rows), plain.evaluate(Rows()))


def assert_equal_evaluations(one: dict[str, float], other: dict[str, float]) -> None:
    for name in ("eval_objective", "eval_fit/violated", "eval_fit/worst"):
        assert one[name] == pytest.approx(other[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, r'columns names "role".*only .*labels'), ({"role": "a"}, "are no numbers")],
)
def test_a_column_that_is_none_is_refused(
    tmp_path: Path, values: dict[str, str], expected: str
) -> None:
    class OfRoles(Constrained):
        columns = ("role",)

    rows = [row | values for row in Rows()]
    with pytest.raises(TrainingError, match=expected):
        made(tmp_path, rows, OfRoles).train()


def test_a_compiled_trainer_takes_a_smaller_last_batch(tmp_path: Path) -> None:
    rows = Subset(Rows(), range(14))
    plain = made(tmp_path, rows)
    plain.train()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    compiled = made(tmp_path, rows, **options)
    compiled.train()
    assert_alike(compiled, plain, 1e-4)


def test_every_search_begins_with_its_own_model_and_multipliers(tmp_path: Path) -> None:
    """The gradients of a model that was thrown away are none, and nothing was enforced."""
    plain = made(tmp_path)
    plain.train()
    new = made(tmp_path, more={"model_init": Net})
    for _ in range(2):
        new.train()
        assert_alike(new, plain)


# Checkpoints -------------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 4}


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_resume_goes_on_to_the_bit(tmp_path: Path, pieces: int) -> None:
    options = {"gradient_accumulation_steps": pieces, **SAVING}
    options["save_steps"] = 4 // pieces
    whole = made(tmp_path, **options)
    whole.train()
    for checkpoint in sorted(tmp_path.glob("checkpoint-*")):
        resumed = made(tmp_path / "again", gradient_accumulation_steps=pieces)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_alike(resumed, whole)


class StopsAt(TrainerCallback):
    """Asks for a checkpoint as SIGTERM does with ``enable_jit_checkpoint``, in a step."""

    def __init__(self, trainer: Any, step: int) -> None:
        self.trainer, self.step = trainer, step

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **_: Any
    ) -> None:
        if state.global_step == self.step:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


def test_a_checkpoint_from_within_a_step_has_its_multipliers(tmp_path: Path) -> None:
    whole = made(tmp_path)
    whole.add_callback(StopsAt(whole, 4))
    whole.train()
    resumed = made(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_alike(resumed, whole)


class Terminates(TrainerCallback):
    """SIGTERM in the fourth step, which then lasts until the trainer has asked for its save."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step >= 4:
            time.sleep(1.5)


@pytest.mark.slow
def test_a_sigterm_saves_what_a_resume_goes_on_from(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole")
    whole.train()
    before = signal.getsignal(signal.SIGTERM)
    stopped = made(
        tmp_path, more={"callbacks": [Terminates()]}, enable_jit_checkpoint=True
    )
    try:
        with suppress(SystemExit):
            stopped.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert 4 <= stopped.state.global_step < 12
    resumed = made(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_alike(resumed, whole)


class Uploads(TrainerCallback):
    """A user's callback, which comes before the trainer's later ones."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        self.seen.append((folder / FILE).is_file())


def test_multipliers_are_there_when_callbacks_upload(tmp_path: Path) -> None:
    uploads = Uploads()
    made(tmp_path, more={"callbacks": [uploads]}, **SAVING).train()
    assert uploads.seen == [True, True, True]


def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(tmp_path / "whole")
    whole.train()
    failing = made(tmp_path, save_total_limit=1, **SAVING)
    save = torch.save

    def full(state: Any, file: Any, *args: Any, **options: Any) -> None:
        if isinstance(state, dict) and state.get("steps") == 8:
            raise OSError(28, "No space left on device")
        save(state, file, *args, **options)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match="could not be written"):
        failing.train()
    monkeypatch.undo()
    assert not (tmp_path / "checkpoint-8" / FILE).exists()
    resumed = made(tmp_path)
    with pytest.raises(TrainingError, match="is missing"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    resumed.train(resume_from_checkpoint=True)
    assert_alike(resumed, whole)


def test_files_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    """A second run in the folder, stopped before its own λ, went on with that of the first."""
    made(tmp_path, **SAVING).train()
    first = tmp_path / "first.pt"
    shutil.copy(tmp_path / "checkpoint-8" / FILE, first)
    made(tmp_path, **SAVING, learning_rate=0.02).train()
    shutil.copy(first, tmp_path / "checkpoint-8" / FILE)
    with pytest.raises(TrainingError, match="files of two savings"):
        made(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    stopped = made(tmp_path, **SAVING)
    stopped._save_multipliers = lambda folder: (_ for _ in ()).throw(
        KeyboardInterrupt()
    )
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert not (tmp_path / "checkpoint-4" / FILE).exists()


@pytest.mark.parametrize("form", ["datasets", "torch"])
def test_rows_in_another_order_are_refused(tmp_path: Path, form: str) -> None:
    def rows(order: list[int]) -> Any:
        if form == "torch":
            return Subset(Rows(), order)
        from datasets import Dataset as Table

        listed = [{k: v.tolist() for k, v in Rows()[i].items()} for i in order]
        return Table.from_list(listed)

    made(tmp_path, rows([*range(ROWS)]), **SAVING).train()
    other = made(tmp_path, rows([*range(1, ROWS), 0]))
    with pytest.raises(TrainingError, match="another training set, order or groups"):
        other.train(resume_from_checkpoint=True)
    made(tmp_path, rows([*range(ROWS)])).train(resume_from_checkpoint=True)


def test_other_groups_are_refused(tmp_path: Path) -> None:
    made(tmp_path, groups=[0, 1] * 8, **SAVING).train()
    other = made(tmp_path, groups=[1, 0] * 8)
    with pytest.raises(TrainingError, match="another training set, order or groups"):
        other.train(resume_from_checkpoint=True)


def test_the_best_model_has_the_multipliers_of_its_step(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_fit/worst",
        "greater_is_better": True,  # The first.
    }
    best = made(tmp_path, **SAVING, **options)
    best.train()
    step = best.state.best_global_step
    assert best.constrained.steps == step < 12
    saved = torch.load(tmp_path / f"checkpoint-{step}" / FILE, weights_only=True)
    assert torch.equal(best.constrained.multipliers["fit"], saved["multipliers"]["fit"])


def test_a_checkpoint_of_the_model_alone_has_multipliers(tmp_path: Path) -> None:
    made(tmp_path, save_only_model=True, **SAVING).train()
    assert all((path / FILE).is_file() for path in tmp_path.glob("checkpoint-*"))
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()


def test_the_last_whole_checkpoint_is_found(tmp_path: Path) -> None:
    made(tmp_path, **SAVING).train()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text("{")
    (tmp_path / "checkpoint-8" / FILE).write_text("half")
    resumed = made(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.constrained.steps == 12
    for path in tmp_path.glob("checkpoint-*"):
        (path / FILE).unlink()
    with pytest.raises(TrainingError, match="No checkpoint in"):
        made(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        made(tmp_path / "empty").train(resume_from_checkpoint=True)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["pl_pointwise"]


# Evaluations -------------------------------------------------------------------------------------


def test_an_evaluation_takes_the_mask_of_the_objective(tmp_path: Path) -> None:
    rows = Rows()
    found = made(tmp_path, kind=Objected, per_device_eval_batch_size=ROWS)
    with torch.no_grad():
        outputs = found.model(rows.x)["logits"]
    expected = float(outputs.square()[rows.applies].mean())
    assert found.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_metrics_and_predictions_are_of_what_the_model_returns(tmp_path: Path) -> None:
    rows, seen = Rows(), []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(
            (torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids))
        )
        return {
            "error": float(abs(prediction.predictions - prediction.label_ids).mean())
        }

    found = made(tmp_path, more={"compute_metrics": metrics})
    assert "eval_error" in found.evaluate()
    with torch.no_grad():
        outputs = found.model(rows.x)["logits"]
    torch.testing.assert_close(seen[0][0], outputs)
    torch.testing.assert_close(seen[0][1], rows.labels)
    torch.testing.assert_close(torch.tensor(found.predict(rows).predictions), outputs)
    found.train()
    found.evaluate(found.train_dataset)  # Whose rows have their index.


# What cannot be ----------------------------------------------------------------------------------


RETURNS: dict[str, tuple[Any, str]] = {
    "one": (lambda o, v: o, r"terms\(\) returned no tuple"),
    "none": (lambda o, v: None, r"terms\(\) returned no tuple \(NoneType\)"),
    "no dict": (lambda o, v: (o, v), r"The values of terms\(\) returned a Tensor"),
    "no value": (
        lambda o, v: (o, {"fit": None}),
        r'The values of terms\(\)\["fit"\] is None',
    ),
    "a mean": (lambda o, v: (o.mean(), {"fit": v}), "do not reduce over the batch"),
    "a mask": (
        lambda o, v: (o, {"fit": v}, {"objective": torch.ones(len(v))}),
        r'The masks of terms\(\)\["objective"\] must be bool',
    ),
    "no masks": (lambda o, v: (o, {"fit": v}, None), ""),
}


@pytest.mark.parametrize("form", RETURNS)
def test_what_terms_returns_is_told_in_its_words(tmp_path: Path, form: str) -> None:
    """In training and evaluation alike."""
    give, expected = RETURNS[form]

    class Own(Constrained):
        def terms(self, model: Any, inputs: Any) -> Any:
            objective, values, _ = super().terms(model, inputs)
            return give(objective, values["fit"])

    found = made(tmp_path, kind=Own)
    for act in (found.train, found.evaluate):
        if not expected:
            act()
            continue
        with pytest.raises((TrainingError, ValueError), match=expected):
            act()


def test_masks_are_checked_before_a_forward_pass(tmp_path: Path) -> None:
    class Misnamed(Masked):
        def masks(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
            return {"fits": inputs["applies"]}

    class Floats(Masked):
        def masks(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
            return {"fit": inputs["applies"].float()}

    with pytest.raises(ValueError, match=r"masks\(\) names 'fits'"):
        made(tmp_path, kind=Misnamed).train()
    with pytest.raises(ValueError, match=r'masks\(\)\["fit"\] must be bool'):
        made(tmp_path, kind=Floats).train()


class GRPOTrainer(Trainer):
    """By its name."""


def test_what_cannot_be_is_refused_at_construction(tmp_path: Path) -> None:
    class Online(PointwiseTrainerMixin, GRPOTrainer):
        def terms(self, model: Any, inputs: Any) -> Any: ...

    given: Any = {
        "constraints": {"fit": Constraint(at_most=1.0)},
        "formulation": Pointwise(),
    }
    with pytest.raises(TrainingError, match="GRPOTrainer makes its samples itself"):
        Online(model=Net(), **given)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    arguments.packing = True
    with pytest.raises(
        TrainingError, match="packing=True puts several examples in a row"
    ):
        Constrained(Net(), arguments, **given)
    arguments.packing, arguments.ddp_static_graph = False, True
    with pytest.raises(TrainingError, match="Leave static_graph out"):
        Constrained(Net(), arguments, **given)
    with pytest.raises(TrainingError, match="several data sets"):
        made(tmp_path, more={}, rows={"a": Rows(), "b": Rows()})
    arguments.ddp_static_graph = False
    with pytest.raises(TrainingError, match="several data sets"):
        Constrained(Net(), arguments, None, {"a": Rows(), "b": Rows()}, **given)
    with pytest.raises(TrainingError, match="label_smoothing_factor is not used"):
        made(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(TrainingError, match="names its trainer before the mix-in"):
        type("Late", (Trainer, PointwiseTrainerMixin), {})
    with pytest.raises(TrainingError, match="compute_loss_func is not called"):
        made(tmp_path, more={"compute_loss_func": lambda *_: None})


def test_a_transform_of_ones_own_keeps_the_index(tmp_path: Path) -> None:
    from datasets import Dataset as Table

    rows = Rows()
    table = Table.from_dict({"number": [*range(ROWS)]})
    table = table.with_transform(
        lambda batch: {
            name: [getattr(rows, name)[i] for i in batch["number"]]
            for name in ("x", "labels", "applies")
        }
    )
    found = made(tmp_path, table)
    found.train()
    plain = made(tmp_path, rows)
    plain.train()
    assert_alike(found, plain)
