"""Settings that are refused before training; docs/lightning.md lists all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..constraint import Constraint
from ..errors import TrainingError
from ..task import Task, warn
from .training_set import has_multipliers_per_sample, refuse


def check_settings(task: Task) -> None:
    """Refuses what a Trainer may be given and a PointwiseModule would ignore or get wrong."""
    trainer = task.trainer
    callbacks = trainer.callbacks
    kinds = set[type]()
    for callback in callbacks:
        # With the parents: a subclass is refused as what it derives from.
        kinds.update(type(callback).__mro__)
    refuse(
        trainer.gradient_clip_val,
        "Trainer(gradient_clip_val=…): the module clips its gradient itself. Give it "
        "training=Training(gradient_clip_val=…), and leave the Trainer's out.",
    )
    refuse(
        trainer.accumulate_grad_batches != 1 or GradientAccumulationScheduler in kinds,
        "Trainer(accumulate_grad_batches=…) or GradientAccumulationScheduler: a batch is one step. "
        "Take a larger batch_size, and training=Training(micro_batch_size=…).",
    )
    refuse(
        any(
            getattr(saver, "_train_time_interval", None) is not None
            for saver in callbacks
        ),
        "ModelCheckpoint(train_time_interval=…) never saves under manual optimization. Use "
        "every_n_train_steps, or SaveOnTermination.",
    )
    refuse(
        StochasticWeightAveraging in kinds
        and any(isinstance(m, _BatchNorm) for m in task.modules()),
        "StochasticWeightAveraging would step weights and multipliers on while it renews the "
        "statistics of BatchNorm. Use EMAWeightAveraging, or another norm.",
    )
    refuse(
        isinstance(trainer.strategy, (FSDPStrategy, DeepSpeedStrategy)),
        "FSDPStrategy and DeepSpeed hide a part of the gradient from a rank, or all of it. Use "
        "ModelParallelStrategy and fully_shard in configure_model.",
    )
    refuse(
        trainer.reload_dataloaders_every_n_epochs and has_multipliers_per_sample(task),
        "Trainer(reload_dataloaders_every_n_epochs=…): a multiplier per sample belongs to one "
        "training set in one order. Leave it out.",
    )
    refuse(
        any(getattr(finder, "_update_attr", False) for finder in callbacks)
        # Neither a subclass's nor the command line's.
        and task.configure_optimizers.__qualname__
        == "PointwiseModule.configure_optimizers",
        "LearningRateFinder, or Tuner.lr_find(), sets an attribute that nothing reads: the rate is "
        "Optimization(learning_rate=…). Write a configure_optimizers that reads the attribute, or "
        "take lr_find(…, update_attr=False), and give the suggestion to Optimization.",
    )
    _check_hooks(task)


def _check_hooks(task: Task) -> None:
    """Refuses hooks that Lightning calls under automatic optimization only, and that itself."""
    declared = list(task._lagrangian.constraints)
    refuse(
        list(task.constraints) != declared,
        f"self.constraints of {type(task).__name__} was set to something else after "
        f"super().__init__(…), which declared {', '.join(map(repr, declared)) or 'none'}: it is "
        "the module's own. Name your attribute otherwise, or give the constraints to "
        "super().__init__(constraints=…).",
    )
    refuse(
        task.automatic_optimization,
        "automatic_optimization = True: a PointwiseModule steps by itself. Leave the line out.",
    )
    for hook in (
        "optimizer_step",
        "configure_gradient_clipping",
        "optimizer_zero_grad",
    ):
        refuse(
            is_overridden(hook, task),
            f"{type(task).__name__} overrides {hook}, which is never called under manual "
            "optimization: set Training(gradient_clip_val=…), or use on_before_optimizer_step.",
        )
    # Callbacks have this hook too.
    overriding = (*task.trainer.callbacks, task)
    refuse(
        any(is_overridden("on_before_zero_grad", instance) for instance in overriding),
        "on_before_zero_grad is never called under manual optimization: use on_train_batch_end, or "
        "on_before_optimizer_step.",
    )


def check_module(task: Task) -> None:
    """Refuses no weight or optimizer to train, and shards whose gradients nothing adds up."""
    check_trained(task)
    _check_optimizer(task)
    schedulers = task.trainer.lr_scheduler_configs
    refuse(
        any(config.interval not in ("step", "epoch") for config in schedulers)
        or any(config.frequency < 1 for config in schedulers),
        'A scheduler steps every "step" or "epoch" (its "interval"), and at a "frequency" of at '
        "least 1.",
    )
    groups = task.trainer.optimizers[0].param_groups
    # A warm-up begins at a rate of 0, and keeps the peak as initial_lr.
    if not any(group.get("initial_lr", group["lr"]) for group in groups):
        warn(task, "The learning rate is 0: no weight will change.")
    _check_shards(task)
    _warn_of_looser_bounds(task)


def _warn_of_looser_bounds(task: Task) -> None:
    """Where ``validate`` and ``test`` count samples as violated that are met in training."""
    for name in task.formulations:
        trained, judged = task.constraints[name], task.evaluation_constraints[name]
        if _is_looser(trained, judged):
            warn(
                task,
                f"{name} is trained to be {trained.in_words()} and judged by "
                f"{judged.in_words()}: samples that are met in training are counted as violated "
                "by validate and test. Give both one bound, or training the stricter one: "
                f"evaluation_constraints of the module, {name}_tolerance of the evaluation in "
                "the language tasks, evaluation_tolerance in re-ranking.",
            )


def _is_looser(trained: Constraint, judged: Constraint) -> bool:
    """Whether one side of the bound of training allows what that of the evaluation does not."""
    above = below = False
    if trained.at_most is not None and judged.at_most is not None:
        above = trained.at_most > judged.at_most
    if trained.at_least is not None and judged.at_least is not None:
        below = trained.at_least < judged.at_least
    return above or below


def _check_optimizer(task: Task) -> None:
    """Refuses another number of optimizers than one, and one that does not train this module."""
    optimizers = task.trainer.optimizers
    returned = "None" if len(optimizers) == 1 else f"{len(optimizers)} optimizers"
    refuse(
        # Lightning's mock stands where configure_optimizers returned None.
        len(optimizers) != 1 or isinstance(optimizers[0], _MockOptimizer),
        f"configure_optimizers returned {returned}; a PointwiseModule has one optimizer, for the "
        "weights, perhaps of several groups; leave the method out for AdamW.",
    )
    # LBFGS is one of these.
    closure = signature(type(optimizers[0]).step).parameters.get("closure")
    refuse(
        closure is not None and closure.default is Parameter.empty,
        f"{type(optimizers[0]).__name__} needs a closure that computes the loss again; a step "
        "here is computed once. Take an optimizer that steps without one, such as AdamW.",
    )
    # By identity: a weight that was replaced since the optimizer was made is not in it.
    trained = set[int]()
    for group in optimizers[0].param_groups:
        trained.update(id(weight) for weight in group["params"])
    refuse(
        trained.isdisjoint(id(weight) for weight in task.parameters()),
        "The optimizer has no weight of this module: give it self.parameters(), in "
        "configure_optimizers, after the last weight was replaced.",
    )


def _check_shards(task: Task) -> None:
    """Refuses shards whose gradients nothing adds up over the ranks."""
    strategy = task.trainer.strategy
    if not isinstance(strategy, ModelParallelStrategy):
        return
    refuse(
        strategy.distributed_sampler_kwargs["num_replicas"] != task.trainer.world_size,
        "Tensor parallelism: every rank must have samples of its own. Set "
        f"data_parallel_size={task.trainer.world_size} and tensor_parallel_size=1.",
    )
    trained = [(name, p) for name, p in task.named_parameters() if p.requires_grad]
    alone = [name for name, p in trained if not isinstance(p, DTensor)]
    refuse(
        alone,
        f"{len(alone)} of {len(trained)} trained weights are not sharded ({alone[:1]}): nothing "
        "adds up their gradients over the ranks. fully_shard what holds them, too.",
    )


def check_trained(task: Task) -> None:
    """Refuses a module of which no weight is trained."""
    refuse(
        not any(p.requires_grad for p in task.parameters()),
        "No weight requires a gradient. Unfreeze some: module.unfreeze(), part.requires_grad_().",
    )


def why_no_step(trainer: Any) -> str:
    """Why a fit ended before its first step, and what to do."""
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            return f"{name} is 0, so the weights are as they were."
    counts = {"max_epochs": trainer.current_epoch, "max_steps": trainer.global_step}
    for name, done in counts.items():
        limit = getattr(trainer, name)
        # −1 stands for no limit.
        if limit is not None and 0 < limit <= done:
            return (
                f"this Trainer has fitted before, a module or another one, and counts on from "
                f"there: {name} is {limit:,}, and {done:,} are done. Make a new Trainer for each "
                "fit; to go on, give a new one with a larger number ckpt_path=…"
            )
    return (
        f"epoch {trainer.current_epoch} of {trainer.max_epochs}, step {trainer.global_step} of "
        f"{trainer.max_steps}, {trainer.num_training_batches} batches an epoch."
    )


def frozen_weights(task: Task) -> list[str]:
    """Names of the weights that are not trained."""
    return [
        name for name, weight in task.named_parameters() if not weight.requires_grad
    ]


def check_frozen(
    task: Task, before: Sequence[str] | None, at_start: Sequence[str]
) -> None:
    """Refuses, in the first step of a resume, other frozen weights than ``before``, at the save.

    at_start: those before the hooks of this run, which may freeze and unfreeze.
    """
    if before is None:  # Of an older checkpoint it is not known.
        return
    names = {name for name, _ in task.named_parameters()}
    now = {*frozen_weights(task)}
    by_hooks = now ^ {*at_start}  # Which is theirs to change.
    changed = (now ^ (names & {*before})) - by_hooks
    if changed:
        raise TrainingError(
            f"{len(changed)} weights ({min(changed)}, …) are frozen now and were not when this "
            "checkpoint was saved, or the reverse: a resume does not repeat what froze them then, "
            "such as BackboneFinetuning. Set requires_grad in on_fit_start as it was, or start "
            "from load_from_checkpoint, without ckpt_path."
        )


def warn_of_checkpoints(task: Task, left_out: Mapping[str, str]) -> None:
    """Says which arguments of the module checkpoints will lack, now and not at a resume."""
    if left_out:
        names = ", ".join(f"{n} ({kind})" for n, kind in left_out.items())
        warn(
            task,
            f"Checkpoints will not hold the arguments {names}: give them to load_from_checkpoint.",
        )
    batches = task.trainer.num_training_batches
    loader = task.trainer.train_dataloader
    savers = [c for c in task.trainer.callbacks if isinstance(c, ModelCheckpoint)]
    # 0 stands for the ends of epochs alone.
    within = any((saver._every_n_train_steps or batches) % batches for saver in savers)
    if within and not hasattr(loader, "load_state_dict"):
        warn(
            task,
            "A ModelCheckpoint saves in the middle of an epoch, where a run cannot be resumed with "
            f"a {type(loader).__name__}. Use PointwiseDataModule, or save at the end of epochs.",
        )


def refuse_own_step(task: Task, name: str) -> None:
    """Refuses a ``training_step``, ``validation_step`` or ``test_step`` without the module's."""
    lost = "neither objective nor violations are evaluated"
    instead = "update_evaluation_metrics()"
    if name == "training_step":
        lost = "no weight is trained"
        instead = "objective() and constraint_values()"
    raise TrainingError(
        f"{name} of {type(task).__name__} does not call super().{name}(…), so {lost}. Leave it "
        f"out, and write {instead} instead; or call super().{name}(…) in it, in every batch."
    )
