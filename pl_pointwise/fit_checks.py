"""What is checked when a fit starts, before the first step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from .data import PointwiseSampler
from .errors import TrainingError

if TYPE_CHECKING:
    from .manual_optimization import ManualOptimization


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


def training_set(module: ManualOptimization) -> Any:
    """The data set behind the training loader; None where no multiplier belongs to a sample.

    Raises:
        TrainingError: multipliers per sample, and no map-style data set, or a sampler that repeats
            some samples to fill the ranks.
    """
    loader: Any = module.trainer.train_dataloader
    dataset = getattr(loader, "dataset", None)
    rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not rows or isinstance(dataset, IterableDataset):  # Which may have both, and no rows.
        if any(f.scope == "sample" for f in module.formulations.values()):
            raise TrainingError(
                "Multipliers per sample need a training DataLoader over one map-style data set "
                f"with a length, got {type(dataset).__name__}. Load the data into one."
            )
        return None
    ranks = module.trainer.world_size
    if len(dataset) % ranks and not isinstance(loader.sampler, PointwiseSampler):
        raise TrainingError(
            f"{len(dataset)} samples over {ranks} ranks: a "
            f"{type(loader.sampler).__name__} would repeat some and step their multipliers "
            "twice. Use PointwiseDataModule, or a ResumableDataLoader with a PointwiseSampler."
        )
    return dataset


def total_steps(module: ManualOptimization) -> int | None:
    """Batches of the whole run, None where it has no end.

    From the loader: ``estimated_stepping_batches`` would set the loaders up too early for a
    mid-epoch resume.

    Raises:
        TrainingError: a schedule that needs an end, and none is set.
    """
    trainer = module.trainer
    limits: list[float] = [trainer.max_steps] if trainer.max_steps not in (None, -1) else []
    if trainer.max_epochs not in (None, -1):
        limits.append(trainer.max_epochs * trainer.num_training_batches)
    if limits and not math.isinf(min(limits)):
        return int(min(limits))
    if module.optimization.schedule != "constant" or module.optimization.warmup_ratio:
        raise TrainingError(
            "A schedule needs an end: set max_epochs or max_steps, or take "
            'schedule="constant" without a warm-up.'
        )
    return None
