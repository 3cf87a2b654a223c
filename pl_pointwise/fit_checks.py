"""What is checked when a fit starts, before the first step; of its first batch: batch_checks.py.

docs/checks.md lists all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from .data import PointwiseSampler, ResumableDataLoader, fingerprint
from .errors import TrainingError
from .fingerprints import RANDOM_ROWS, kept_random_state, probes_of
from .multiplier_share import PullShares
from .multipliers import Multipliers
from .optimizers import Optimization

if TYPE_CHECKING:
    from .manual_optimization import ManualOptimization


OWN_ATTRIBUTES: dict[str, Any] = {
    "constraints": dict,
    "evaluation_constraints": dict,
    "formulations": dict,
    "multipliers": Multipliers,
    "thresholds": dict,
    "optimization": Optimization,
    "pull_shares": PullShares,
    "violations": dict,
    "evaluated": dict,
    "evaluated_metrics": dict,
    "left_out": int,
    "skipped_steps": int,
}
"""Public attributes of the module, which a subclass must not use for something else."""

SHARED_ROWS = (
    'batch["index"] must be the position of each sample in the training set, or samples share '
    "multipliers: wrap the whole data set, once, as in IndexedDataset(ConcatDataset([…])) or "
    "IndexedDataset(Subset(…)), and not its parts."
)


def check_launcher(module: ManualOptimization, stage: str) -> None:
    """
    Raises:
        TrainingError: processes from which multipliers and violations do not come home.
    """
    launcher = module.trainer.strategy.launcher
    if stage != "predict" and isinstance(launcher, _MultiProcessingLauncher):
        raise TrainingError(
            "This strategy starts processes that end with the run, and their multipliers, "
            "violations and optimizer with them: ddp_spawn, ddp_fork and ddp_notebook bring home "
            'the weights alone. Use strategy="ddp" in a script; in a notebook, devices=1.'
        )


def check_trainer(module: ManualOptimization) -> None:
    """Before Lightning's own check, whose advice does not fit.

    Raises:
        TrainingError: the Trainer was given what the module does itself.
    """
    trainer = module.trainer
    if trainer.state.fn != TrainerFn.FITTING:
        return
    clip, accumulate = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    if clip:
        raise TrainingError(
            f"Trainer(gradient_clip_val={clip}): the module clips its gradient itself, before it "
            f"is checked to be finite. Give training=Training(gradient_clip_val={clip}) to "
            f"{type(module).__name__}, and leave the Trainer's out."
        )
    if accumulate != 1:
        raise TrainingError(
            f"Trainer(accumulate_grad_batches={accumulate}): a batch is one step, or multipliers "
            f"would step on half of one. Make the DataLoader's batch_size {accumulate} times as "
            "large, and give training=Training(micro_batch_size=…) the size that fits in memory."
        )


def check_fit(module: ManualOptimization) -> None:
    """Everything that needs no data, when a fit starts."""
    check_attributes(module)
    check_strategy(module)
    check_optimizer(module)
    check_averaging(module)
    warn_of_checkpoints_that_cannot_resume(module)
    if module._arguments_left_out:
        names = ", ".join(f"{n} ({kind})" for n, kind in module._arguments_left_out.items())
        module._warn(
            f"Checkpoints will not hold the arguments {names}, which have no plain form: give them "
            "to load_from_checkpoint again."
        )


def check_attributes(module: ManualOptimization) -> None:
    """
    Raises:
        TrainingError: a subclass has put something else under a name of the base class.
    """
    for name, kind in OWN_ATTRIBUTES.items():
        value = getattr(module, name)
        if not isinstance(value, kind) or (
            name == "thresholds" and not set(value) <= set(module.formulations)
        ):
            raise TrainingError(
                f"self.{name} of {type(module).__name__} is a {type(value).__name__}, and "
                f"PointwiseModule keeps its own under that name. Give yours another name."
            )


def check_trained(module: ManualOptimization) -> None:
    """
    Raises:
        TrainingError: no weight is trained.
    """
    if not any(p.requires_grad for p in module.parameters()):
        raise TrainingError(
            "No weight requires a gradient, so that multipliers would grow and nothing would be "
            "trained. Unfreeze some: module.unfreeze(), or requires_grad_() of a part."
        )


def check_optimizer(module: ManualOptimization) -> None:
    """
    Raises:
        TrainingError: not one optimizer, or one that this training step cannot drive.
    """
    check_trained(module)
    optimizers = module.trainer.optimizers
    if len(optimizers) != 1:
        raise TrainingError(
            f"configure_optimizers returned {len(optimizers)} optimizers; a PointwiseModule "
            "has one, for the weights. Use parameter groups."
        )
    if isinstance(optimizers[0], _MockOptimizer):
        raise TrainingError(
            "configure_optimizers returned None: nothing would be trained. Return an optimizer, or "
            "leave the method out for AdamW."
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise TrainingError(
            "LBFGS evaluates a step several times, and each would be another dual step. Use an "
            "optimizer that steps on one gradient, such as AdamW or SGD."
        )
    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        trained = isinstance(weight, torch.Tensor) and weight.requires_grad
        if trained and getattr(part, "sparse", False) is True:
            raise TrainingError(
                f"{name or type(part).__name__}: {type(part).__name__}(sparse=True) has sparse "
                "gradients, whose norm cannot be computed or clipped. Use sparse=False, or freeze "
                "it."
            )


def check_averaging(module: ManualOptimization) -> None:
    """
    Raises:
        TrainingError: Lightning would train on to renew the statistics of averaged weights.
    """
    callbacks = module.trainer.callbacks
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks)
    if averages and any(isinstance(part, _BatchNorm) for part in module.modules()):
        raise TrainingError(
            "StochasticWeightAveraging runs one more epoch to renew the statistics of BatchNorm, "
            "in which this module would step weights and multipliers on. Use "
            "lightning.pytorch.callbacks.EMAWeightAveraging, or another norm than BatchNorm."
        )


def warn_of_checkpoints_that_cannot_resume(module: ManualOptimization) -> None:
    """Now, and not when a run is to be resumed in the middle of an epoch."""
    trainer = module.trainer
    each_epoch = trainer.num_training_batches
    saving = [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, ModelCheckpoint)
        and (
            callback._train_time_interval is not None
            or (callback._every_n_train_steps or each_epoch) % each_epoch
        )
    ]
    if not saving:
        return
    where = f"{type(saving[0]).__name__} saves in the middle of an epoch, from where"
    loader = trainer.train_dataloader
    if not hasattr(loader, "load_state_dict"):
        module._warn(
            f"{where} a run cannot be resumed: {type(loader).__name__} does not know its position. "
            "Use PointwiseDataModule, ResumableDataLoader or another loader with state_dict and "
            "load_state_dict, or save at the end of epochs."
        )
    elif module._checks.loaders_set_up_early:
        module._warn(
            f"{where} a run cannot be resumed: configure_optimizers read "
            "trainer.estimated_stepping_batches. Use self.number_of_steps()."
        )


def check_strategy(module: ManualOptimization) -> None:
    """
    Raises:
        TrainingError: a strategy under which the gradient's norm, or the sum over ranks, is wrong.
    """
    strategy = module.trainer.strategy
    if isinstance(strategy, FSDPStrategy):
        raise TrainingError(
            "FSDPStrategy flattens the weights, so that a rank sees a part of the gradient's "
            "norm only. Use ModelParallelStrategy and fully_shard in configure_model."
        )
    if isinstance(strategy, DeepSpeedStrategy) and (
        module.gradient_clip_val is not None or module.micro_batch_size is not None
    ):
        raise TrainingError(
            "DeepSpeed keeps the gradients to itself: set gradient_clipping in its own "
            "configuration, and leave gradient_clip_val and micro_batch_size out."
        )
    if not isinstance(strategy, ModelParallelStrategy):
        return
    if strategy.distributed_sampler_kwargs["num_replicas"] != module.trainer.world_size:
        raise TrainingError(
            "Tensor parallelism: every rank must have samples of its own. Set "
            f"data_parallel_size={module.trainer.world_size} and tensor_parallel_size=1."
        )
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    alone = [name for name, p in trained if not isinstance(p, DTensor)]
    if alone:
        raise TrainingError(
            f"{len(alone)} of {len(trained)} trained weights are not sharded ({alone[0]}), so "
            "nothing adds up their gradients over the ranks. Shard the module that holds them "
            "too, with fully_shard in configure_model."
        )


def has_multipliers_per_sample(module: ManualOptimization) -> bool:
    return any(f.scope == "sample" for f in module.formulations.values())


def training_set(module: ManualOptimization) -> Any:
    """The data set behind the training loader; None where no multiplier belongs to a sample.

    Raises:
        TrainingError: multipliers per sample, and no map-style data set, or one whose rows carry
            another index than their position, or a sampler that repeats some samples to fill the
            ranks.
    """
    loader: Any = module.trainer.train_dataloader
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(loader, ResumableDataLoader):
        loader.limit = min(len(loader), module.trainer.num_training_batches)
    rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not rows or isinstance(dataset, IterableDataset):  # Which may have both, and no rows.
        if has_multipliers_per_sample(module):
            raise TrainingError(
                "Multipliers per sample need a training DataLoader over one map-style data set "
                f"with a length, got {type(dataset).__name__}. Load the data into one."
            )
        return None
    if has_multipliers_per_sample(module):
        check_sampler(loader, module.trainer.world_size)
        check_index(dataset)
    return dataset


def check_sampler(loader: Any, ranks: int) -> None:
    """
    Raises:
        TrainingError: over several ranks, some samples come twice in an epoch.
    """
    sampler = sampler_of(loader)
    if ranks == 1 or isinstance(sampler, PointwiseSampler):
        return
    remedy = "Use PointwiseDataModule, or a ResumableDataLoader with a PointwiseSampler."
    if isinstance(sampler, DistributedSampler):
        positions = len(sampler.dataset)  # type: ignore[arg-type]  # Of a sampler that Lightning wrapped: that sampler's.
        if positions % ranks and not sampler.drop_last:
            raise TrainingError(
                f"{positions} samples over {ranks} ranks: a {type(sampler).__name__} would repeat "
                f"some and step their multipliers twice. {remedy}"
            )
    elif isinstance(sampler, (SequentialSampler, RandomSampler)):
        raise TrainingError(
            f"{ranks} ranks, and a {type(sampler).__name__} that gives every rank all samples: "
            f"they would be stepped {ranks} times. {remedy}"
        )


def sampler_of(loader: Any) -> Any:
    """What gives a loader its positions."""
    return getattr(getattr(loader, "batch_sampler", None), "sampler", None) or getattr(
        loader, "sampler", None
    )


def repeats_samples(loader: Any) -> bool:
    """Whether the sampler may give a position twice an epoch, as one with replacement does."""
    sampler = sampler_of(loader)
    if isinstance(sampler, RandomSampler):
        return sampler.replacement or sampler.num_samples > len(sampler.data_source)
    known = (PointwiseSampler, SequentialSampler, DistributedSampler)
    wrapped = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    return wrapped is not None or type(sampler) not in known


def check_index(dataset: Any) -> None:
    """At the rows that a fingerprint reads: all of a small data set, 64 of a large one.

    Rows without "index" are left to the collate function.

    Raises:
        TrainingError: a row carries another index than its position.
    """
    with kept_random_state():
        for position in probes_of(len(dataset)):
            row = dataset[position]
            if not isinstance(row, Mapping) or "index" not in row:
                return
            if int(row["index"]) != position:
                raise TrainingError(
                    f'Row {position} of {type(dataset).__name__} carries "index" '
                    f"{int(row['index'])}. {SHARED_ROWS}"
                )


def warn_of_random_rows(module: ManualOptimization, found: str) -> None:
    """found: the training set's fingerprint."""
    if found.startswith(RANDOM_ROWS):
        module._warn(
            "Rows of the training set differ each time they are read, so only their number tells a "
            "resumed run whether they are the same. Give the data set an attribute `fingerprint`, "
            "a text of your own, to have that checked."
        )


def require_same_data(module: ManualOptimization, dataset: Any) -> None:
    """
    Raises:
        TrainingError: a reload in the middle of a fit brought another training set.
    """
    if fingerprint(dataset) != module._fingerprint:
        raise TrainingError(
            f"Epoch {module.current_epoch}: the training DataLoader was reloaded over another "
            f"training set, or another order of it ({module.multipliers.samples:,} samples before, "
            f"{len(dataset):,} now), and multipliers belong to samples. Keep the data as they are, "
            "or leave reload_dataloaders_every_n_epochs out; new data need a fit of their own."
        )


def number_of_steps(module: ManualOptimization) -> int:
    """Steps of the whole run, of a loader that is made to be counted if there is none yet.

    Raises:
        TrainingError: the run has no end.
    """
    trainer: Any = module.trainer
    batches: float = trainer.num_training_batches
    if trainer.train_dataloader is None and trainer.max_epochs not in (None, -1):
        made = trainer.fit_loop._data_source.dataloader()
        loader: Any = _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, made)
        limit = trainer.limit_train_batches
        length = len(loader) if hasattr(loader, "__len__") else math.inf
        batches = min(length, limit) if isinstance(limit, int) else length
        batches = int(length * limit) if isinstance(limit, float) and limit < 1 else batches
        if trainer.overfit_batches:
            share = trainer.overfit_batches
            batches = min(length, share) if isinstance(share, int) else int(length * share)
    steps = steps_until_the_end(trainer, batches)
    if steps is None:
        raise TrainingError("The run has no end: set max_epochs or max_steps of the Trainer.")
    return steps


def steps_until_the_end(trainer: Any, batches: float) -> int | None:
    """The smaller of both limits, None where there is none; of ``batches`` an epoch."""
    limits: list[float] = [trainer.max_steps] if trainer.max_steps not in (None, -1) else []
    if trainer.max_epochs not in (None, -1):
        limits.append(trainer.max_epochs * batches)
    return int(min(limits)) if limits and not math.isinf(min(limits)) else None


def total_steps(module: ManualOptimization) -> int | None:
    """Batches of the whole run, None where it has no end.

    From the loader: ``estimated_stepping_batches`` would set the loaders up too early for a
    mid-epoch resume.

    Raises:
        TrainingError: a schedule that needs an end, and none is set.
    """
    steps = steps_until_the_end(module.trainer, module.trainer.num_training_batches)
    if steps is not None:
        return steps
    if not module.optimization.is_constant:
        raise TrainingError(
            "A schedule needs an end: set max_epochs or max_steps, or take "
            'schedule="constant" without a warm-up.'
        )
    return None
