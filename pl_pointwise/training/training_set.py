"""What is refused of a training set: multipliers belong to its samples, by their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DistributedSampler

from ..data import PointwiseSampler, dataset_of
from ..errors import TrainingError
from ..task import Task, warn

SHARED_ROWS = (
    'batch["index"] must be the position of each sample in the training set, or samples share '
    "multipliers: wrap the whole data set, once, as in IndexedDataset(ConcatDataset([…]))."
)


def refuse(wrong: Any, sentence: str) -> None:
    """Raises the sentence if what it speaks of is so."""
    if wrong:
        raise TrainingError(sentence)


def training_set(task: Task) -> Any:
    """The data set behind the training loader; None where there is none with positions."""
    loader: Any = task.trainer.train_dataloader
    dataset = dataset_of(loader)
    if not has_multipliers_per_sample(task):
        return dataset
    if dataset is None:
        _check_stream(task, loader)
        return None
    check_sampler(loader, task.trainer.world_size)
    check_index(dataset)
    return dataset


def _check_stream(task: Task, loader: Any) -> None:
    """Refuses a stream, unless the common part of the force can act without multipliers."""
    per_sample = [f for f in task.formulations.values() if f.scope == "sample"]
    kind = type(getattr(loader, "dataset", loader)).__name__
    several = isinstance(loader, (list, tuple, Mapping))
    if several or not all(formulation.adaptive for formulation in per_sample):
        raise TrainingError(
            "Multipliers per sample need one training DataLoader over one map-style data set with "
            f"a length, as IndexedDataset(ConcatDataset([…])), got {kind}. Without a stated alpha "
            "one stream is trained without multipliers."
        )
    warn(
        task,
        f"{kind} is a stream, of which no sample comes again: λ stays 0, and the common part of "
        "the force acts alone (docs/formulations.md).",
    )


def check_index(dataset: Any) -> None:
    """Refuses rows with another index than their position, of some; without one, collate adds it.

    Steps show that a sample comes twice; not one in another order, nor behind a sampler that draws.
    """
    count = len(dataset)
    probes = set(range(0, count, 1 if count <= 1024 else count // 64))
    # Of a ConcatDataset the last of each part: parts with an index of their own begin again at 0.
    for end in getattr(dataset, "cumulative_sizes", ()):
        if end:
            probes.add(end - 1)
    with isolate_rng(include_cuda=False):
        for position in sorted(probes):
            row = dataset[position]
            if not isinstance(row, Mapping) or "index" not in row:
                return
            index = int(row["index"])
            kind = type(dataset).__name__
            refuse(
                index != position,
                f'Row {position} of {kind} has "index" {index}. {SHARED_ROWS}',
            )


def has_multipliers_per_sample(task: Task) -> bool:
    """Whether some constraint has a λ for each sample."""
    return any(f.scope == "sample" for f in task.formulations.values())


def sampler_of(loader: Any) -> Any:
    """What gives a loader its positions."""
    of_batches = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return of_batches or getattr(loader, "sampler", None)


def check_sampler(loader: Any, ranks: int) -> None:
    """Refuses, over several ranks, samplers that may give a sample to two of them."""
    sampler = sampler_of(loader)
    # Lightning puts torch's into a plain DataLoader; that repeats samples to fill up the ranks.
    if type(sampler) is DistributedSampler and sampler.num_replicas == ranks:
        repeated = max(0, sampler.total_size - len(loader.dataset))
        refuse(
            repeated,
            f"{len(loader.dataset):,} samples over {ranks} ranks: the DistributedSampler repeats "
            f"{repeated}. Use PointwiseDataModule, a PointwiseSampler with num_replicas and rank, "
            "or a number of samples that the ranks share evenly.",
        )
        return
    refuse(
        ranks > 1 and not isinstance(sampler, PointwiseSampler),
        f"A {type(sampler).__name__} over {ranks} ranks may give a sample to two of them. Use "
        "PointwiseDataModule, or a PointwiseSampler with num_replicas and rank.",
    )
