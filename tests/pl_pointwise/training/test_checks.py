"""What goes wrong in ordinary Lightning habits is refused before the first step, by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from pl_pointwise import (
    Average,
    Constraint,
    Optimization,
    Penalty,
    Pointwise,
    PointwiseModule,
    Training,
)
from pl_pointwise.data import IndexedDataset, PointwiseSampler, ResumableDataLoader
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.training.training_set import check_sampler
from tests.pl_pointwise.toy import Toy, ToyRows, stack, trainer


class Line(Toy):
    """The toy under one constraint; the tests break a part of it."""

    def __init__(self, formulation: Any = Pointwise()) -> None:  # noqa: B008
        super().__init__(formulation, {"fit": Constraint(at_most=0.1)})


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    dataset = IndexedDataset(ToyRows(8)) if dataset is None else dataset
    return DataLoader(dataset, **({"batch_size": 4} | options))


def fit(module: Any, train: Any = None, **options: Any) -> Any:
    trainer(**options).fit(module, loader() if train is None else train)
    return module


# Index ------------------------------------------------------------------------------------------


def numbered(count: int, step: int = 1) -> list[dict[str, Any]]:
    return [{**row, "index": i * step} for i, row in enumerate(ToyRows(count))]


@pytest.mark.parametrize(
    "dataset",
    [
        ConcatDataset([IndexedDataset(ToyRows(4)), IndexedDataset(ToyRows(4))]),
        numbered(8, step=0),
        numbered(8)[::-1],
        Subset(IndexedDataset(ToyRows(12)), range(3, 11)),
        ConcatDataset([numbered(2000), numbered(20)]),
    ],
    ids=["two", "constant", "another order", "subset", "own numbers"],
)
def test_an_index_that_is_not_the_position_is_refused(dataset: Any) -> None:
    """Samples shared rows of λ, other rows stayed 0, without a word."""
    module = Line()
    with pytest.raises(TrainingError, match=r"wrap the whole data set"):
        fit(
            module,
            loader(
                dataset, sampler=WeightedRandomSampler(torch.ones(len(dataset)), 16)
            ),
        )
    assert module.global_step == 0


def test_a_data_set_that_is_wrapped_as_a_whole_is_welcome() -> None:
    whole = IndexedDataset(
        ConcatDataset([IndexedDataset(ToyRows(8)), IndexedDataset(ToyRows(4))])
    )
    assert fit(Line(), loader(whole)).global_step == 3


def collate_counting_from_zero(rows: list[Any]) -> dict[str, Tensor]:
    """Adds what a row lacks, wrongly: the position in the batch."""
    return {**stack(rows), "index": torch.arange(len(rows))}


def test_an_index_that_comes_twice_in_an_epoch_is_refused() -> None:
    """A collate function that numbers the samples of a batch shared λ over all batches."""
    module = Line()
    with pytest.raises(TrainingError, match="index 0 came twice in epoch 0"):
        fit(module, loader(ToyRows(8), collate_fn=collate_counting_from_zero))
    assert module.global_step == 1


def test_an_index_is_watched_until_an_epoch_had_every_sample() -> None:
    """A part of an epoch proves nothing of the samples that it had not."""
    module = Line()

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        late = module.current_epoch > 0
        return collate_counting_from_zero(rows) if late else stack(rows)

    rows = loader(IndexedDataset(ToyRows(12)), collate_fn=collate)
    with pytest.raises(TrainingError, match="index 0 came twice in epoch 1"):
        fit(module, rows, max_epochs=2, limit_train_batches=2)


def test_after_a_whole_epoch_no_step_looks_at_the_index_again() -> None:
    """An epoch is another order of the same rows: each has shown that its number is its own."""
    watch = fit(Line(), max_epochs=1)._stepper.watch
    assert not watch.is_over
    assert fit(Line(), max_epochs=2)._stepper.watch.is_over


def test_a_collate_function_with_indices_of_other_types_is_refused() -> None:
    def floating(rows: list[Any]) -> dict[str, Tensor]:
        return {
            **collate_counting_from_zero(rows),
            "index": torch.arange(len(rows)) * 1.0,
        }

    with pytest.raises(
        DataError, match=r"whole numbers, got torch\.float32.*collate of your own"
    ):
        fit(Line(), loader(ToyRows(8), collate_fn=floating))


@pytest.mark.parametrize("formulation", [Pointwise(), Average()])
def test_an_index_below_padding_is_refused(formulation: Any) -> None:
    """Its samples were taken for padding, and half of the data trained nothing."""

    def shifted(rows: list[Any]) -> dict[str, Tensor]:
        batch = stack(rows)
        return {**batch, "index": batch["index"] - 2}

    with pytest.raises(DataError, match="holds -2: a position in the training set"):
        fit(Line(formulation), loader(collate_fn=shifted))


def test_data_that_may_change_in_a_run_are_refused() -> None:
    """λ of a sample went on as another sample's."""
    options: dict[str, Any] = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    with pytest.raises(TrainingError, match="reload_dataloaders_every_n_epochs"):
        fit(Line(), **options)
    assert fit(Line(Average()), **options).global_step == 6


# Samplers over ranks ----------------------------------------------------------------------------


def test_over_ranks_no_sampler_gives_a_sample_to_two() -> None:
    """Eleven rows over two ranks: Lightning's own sampler repeated one, stepped twice."""
    rows = IndexedDataset(ToyRows(11))
    sampler: Any = DistributedSampler(rows, num_replicas=2, rank=0)
    with pytest.raises(TrainingError, match=r"11 samples over 2 ranks: .*repeats 1\."):
        check_sampler(loader(rows, sampler=sampler), 2)
    for ranks, drop_last in ((2, True), (11, False)):
        even = DistributedSampler(rows, num_replicas=ranks, rank=0, drop_last=drop_last)
        check_sampler(loader(rows, sampler=even), ranks)
    for sampler in (
        RandomSampler(rows),
        DistributedSampler(rows, num_replicas=3, rank=0),
    ):
        with pytest.raises(
            TrainingError, match="Sampler over 2 ranks may give a sample to two"
        ):
            check_sampler(loader(rows, sampler=sampler), 2)
    check_sampler(loader(rows, sampler=PointwiseSampler(rows, num_replicas=2)), 2)
    check_sampler(loader(rows, sampler=sampler), 1)


# Values without a gradient ----------------------------------------------------------------------


class WithoutGradient(Line):
    def __init__(self, term: str, formulation: Any = Pointwise()) -> None:  # noqa: B008
        super().__init__(formulation)
        self.term = term

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        value = super().objective(outputs, batch)
        if self.term == "no objective":
            return torch.zeros_like(outputs).detach()
        return value.detach() if self.term == "objective" else value

    def constraint_values(self, outputs: Tensor, batch: Any) -> Any:
        return {"fit": (outputs > 0).float() if self.term == "fit" else outputs}


@pytest.mark.parametrize(
    ("term", "match"),
    [
        ("fit", 'Constraint "fit": its values have no gradient'),
        ("objective", "The objecti"),
    ],
)
def test_a_term_without_a_gradient_is_refused_by_name(term: str, match: str) -> None:
    """A share of errors was accepted as a constraint, and its λ grew."""
    module = WithoutGradient(term)
    with pytest.raises(TrainingError, match=match):
        fit(module)
    assert module.global_step == 0


def test_what_is_only_measured_needs_no_gradient() -> None:
    assert fit(WithoutGradient("fit", None)).global_step == 2
    assert fit(WithoutGradient("fit", Penalty(weight=0.0))).global_step == 2
    assert fit(WithoutGradient("no objective")).global_step == 2


# Settings that cannot be ------------------------------------------------------------------------

NO_FORMULATION = r"Not a formulation: .* such as Pointwise\("


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (Optimization, {"schedule": "cosin"}, "one of .*cosine"),
        (Optimization, {"warmup_ratio": 10}, "at least 0 and at most 1"),
        (Optimization, {"learning_rate": "1e-4"}, "must be a number"),
        (
            Training,
            {"gradient_clip_val": 0},
            "=0: must be a number, above 0. None sets",
        ),
        (Training, {"micro_batch_size": 2.5}, "a number, whole"),
        (Training, {"order": "dual-first"}, "one of .*dual_first"),
        (Training, {"optimization": "adam"}, "Optimization.learning_rate"),
        (Line, {"formulation": "pointwise"}, NO_FORMULATION),
        (Line, {"formulation": Pointwise}, NO_FORMULATION),
        (Line, {"formulation": {"fit": "average"}}, NO_FORMULATION),
        (
            PointwiseModule,
            {"formulation": None, "constraints": {"fit": 0.1}},
            "Constraint",
        ),
        (
            PointwiseModule,
            {"formulation": None, "constraints": Constraint(at_most=0)},
            "Constraint",
        ),
    ],
)
def test_impossible_settings_are_told_what_to_write(
    kind: Any, settings: Any, match: str
) -> None:
    """schedule="cosin" was constant, clipping at 0 froze the weights while λ grew."""
    with pytest.raises(ValueError, match=match):
        kind(**settings)
    assert Optimization(learning_rate=0.0, warmup_ratio=1).warmup_ratio == 1


@pytest.mark.parametrize("method", ["constraint_values", "membership"])
def test_a_bare_tensor_is_told_what_to_write(method: str) -> None:
    """The message listed tensors."""
    module = Line()
    setattr(module, method, lambda *args: torch.zeros(4))
    with pytest.raises(
        ValueError, match=rf"{method}\(\) returned a Tensor: return a dict .*\"fit"
    ):
        fit(module)


def test_what_cannot_be_per_sample_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A list of loaders was a stream, and (B, 1) against (B,) trained on B² values."""
    module = Line()
    module.membership = lambda batch: {"fit": [True] * 4}  # type: ignore
    with pytest.raises(DataError, match=r"must be bool .* got no tensor of shape list"):
        fit(module)
    with pytest.raises(
        TrainingError, match=r"need one training DataLoader .* got list"
    ):
        fit(Line(), [loader(), loader()])
    module.membership = lambda batch: {}  # type: ignore
    module.constraint_values = lambda outputs, batch: {
        "fit": outputs - batch["y"][:, None]
    }  # type: ignore
    fit(module)
    assert "broadcast" in caplog.text


# What Lightning offers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gradient_clip_val": 0.5}, r"training=Training\(gradient_clip_val=…\)"),
        ({"accumulate_grad_batches": 4}, r"training=Training\(micro_batch_size=…\)"),
    ],
)
def test_the_trainers_own_options_name_the_modules(options: Any, match: str) -> None:
    """Lightning advised to switch to automatic optimization."""
    with pytest.raises(TrainingError, match=match):
        fit(Line(), **options)

    class Overriding(Line):
        def configure_callbacks(self) -> list[Any]:
            return []

    with pytest.raises(TrainingError, match=match):
        fit(Overriding(), **options)
    evaluating = trainer(**options)
    evaluating.test(Line(), loader(), verbose=False)


def test_weight_averaging_over_batch_norm_is_refused() -> None:
    """It trained one more epoch, with steps of weights and multipliers."""
    module = Line()
    average = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    assert fit(module, callbacks=[average], max_epochs=2).global_step == 4
    module = Line()
    module.dropout = torch.nn.BatchNorm1d(5, dtype=torch.float64)  # type: ignore[assignment]
    average = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    with pytest.raises(TrainingError, match="BatchNorm"):
        fit(module, callbacks=[average], max_epochs=2)


# Resuming, and the number of steps --------------------------------------------------------------


def resumable(count: int = 8) -> ResumableDataLoader:
    dataset = IndexedDataset(ToyRows(count))
    return ResumableDataLoader(dataset, PointwiseSampler(dataset), 2, stack)


class Scheduled(Line):
    steps: int

    def configure_optimizers(self) -> Any:
        self.steps = self.number_of_steps()
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 3, "limit_train_batches": 3}, 9),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"fast_dev_run": 2}, 2),
    ],
)
def test_number_of_steps_is_what_is_taken(options: Any, steps: int) -> None:
    module = fit(Scheduled(), resumable(), **options)
    assert module.steps == module.global_step == steps
    with pytest.raises(TrainingError, match="no end"):
        fit(Scheduled(), resumable(), max_epochs=-1, max_steps=-1)


# Rows that are tuples, and rows that are random -------------------------------------------------


def test_a_tensor_data_set_trains_with_names() -> None:
    """The error recommended IndexedDataset, which then raised "'tuple' object is not a mapping"."""
    tensors = TensorDataset(ToyRows(8).x, ToyRows(8).y)
    with pytest.raises(DataError, match=r"fields=\[\"x\", \"y\"\]\)"):
        fit(Line(), loader(tensors))
    with pytest.raises(
        DataError, match=r"tuples of 2 without names.*fields=\[\"x\", \"y\"\]"
    ):
        fit(Line(), loader(IndexedDataset(tensors)))
    module = fit(Line(), loader(IndexedDataset(tensors, fields=("x", "y"))))
    assert module.global_step == 2


class Augmented(ToyRows):
    def __getitem__(self, position: int) -> dict[str, Any]:
        row = super().__getitem__(position)
        return {**row, "x": row["x"] + 0.01 * torch.randn(4)}


def test_random_rows_resume_and_are_warned_of(tmp_path: Path, caplog: Any) -> None:
    """Random augmentation in __getitem__ was refused as another training set."""
    path = tmp_path / "augmented.ckpt"
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        module = fit(Line(), loader(IndexedDataset(Augmented(8))))
    assert "differ each time they are read" in caplog.text
    module.trainer.save_checkpoint(path)
    resumed = Line()
    trainer(max_epochs=2).fit(
        resumed, loader(IndexedDataset(Augmented(8))), ckpt_path=path
    )
    assert resumed.global_step == 4
    with pytest.raises(TrainingError, match="another training set"):
        trainer(max_epochs=2).fit(
            Line(), loader(IndexedDataset(Augmented(6))), ckpt_path=path
        )


def test_a_formulation_must_keep_its_arguments() -> None:
    class Forgetful(Pointwise):
        def __init__(self, *, strength: float = 1.0) -> None:
            super().__init__(alpha=strength)

    with pytest.raises(AttributeError, match=r"Forgetful.* no attribute"):
        Line(Forgetful())


@pytest.mark.parametrize(
    ("train", "options", "warned"),
    [
        (loader(batch_size=2), {"every_n_train_steps": 3}, True),
        (loader(batch_size=2), {"every_n_train_steps": 4}, False),
        (resumable(), {"every_n_train_steps": 3}, False),
    ],
)
def test_a_plain_loader_that_cannot_resume_is_said_at_the_start(
    train: Any, options: Any, warned: bool, tmp_path: Path, caplog: Any
) -> None:
    """It was said at the resume, when the run had been lost."""
    saver = ModelCheckpoint(tmp_path, **options)
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        fit(Line(), train, callbacks=[saver], enable_checkpointing=True)
    assert ("saves in the middle of an epoch" in caplog.text) == warned
