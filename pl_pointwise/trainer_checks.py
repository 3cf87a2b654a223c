"""What of Lightning's ways a module that steps by itself cannot follow; refused, not ignored."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer import call

from .errors import TrainingError

if TYPE_CHECKING:
    from .manual_optimization import ManualOptimization

# It says that weights are saved after the step: here they are, with the multipliers after it.
warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
# Then it logs once an epoch: log_each_epoch.
warnings.filterwarnings("ignore", message=r"The number of training batches \(")

NEVER_CALLED = {
    "optimizer_step": "Change learning rates in a scheduler of configure_optimizers, or look at "
    "gradients in on_before_optimizer_step, which is called.",
    "configure_gradient_clipping": "Set Training(gradient_clip_val=…), or change gradients in "
    "on_before_optimizer_step.",
    "optimizer_zero_grad": "The gradients of a step begin at zero; look at those of the last one "
    "in on_before_optimizer_step.",
}
"""Hooks that Lightning calls under automatic optimization only, with what to do instead."""


def prepare(module: ManualOptimization) -> None:
    """Before Lightning looks at callbacks and starts the fit.

    Of a module from ``torch.compile``, the forward pass stays compiled and the steps do not: they
    hold the backward pass, which a compiler does not take.

    Raises:
        TrainingError: a callback that accumulates gradients over batches, or saves by the clock.
    """
    context = getattr(module, "_compiler_ctx", None)
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if context is not None:
            setattr(module, step, context[f"original_{step}"])
    trainer = module.trainer
    for loop in (
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    ):
        # torch.no_grad() does in its place, within which a task may enable gradients of inputs.
        loop.inference_mode = False
    callbacks: list[Any] = trainer.callbacks
    if any(isinstance(c, GradientAccumulationScheduler) for c in callbacks):
        raise TrainingError(
            "GradientAccumulationScheduler: a batch of the training DataLoader is one step here. "
            "Take the callback out, give the loader the whole step's batch size, and set "
            "Training(micro_batch_size=…) to what fits into memory at once."
        )
    if any(getattr(c, "_train_time_interval", None) is not None for c in callbacks):
        raise TrainingError(
            "ModelCheckpoint(train_time_interval=…) never saves under manual optimization. Use "
            "every_n_train_steps, or SaveOnTermination for the end of a job's time."
        )


def check_start(module: ManualOptimization) -> None:
    """When the training starts, before the first step.

    Raises:
        TrainingError: something that would be ignored, or that no step can be taken with.
    """
    _check_overrides(module)
    loaders = module.trainer.train_dataloader
    if isinstance(loaders, Mapping):
        raise TrainingError(
            f"Training DataLoaders {', '.join(map(repr, loaders))}: a batch would be one of each, "
            "and a step takes one batch of one training set. Use a DataLoader over a "
            "ConcatDataset of them, within one IndexedDataset."
        )


def log_each_epoch(module: ManualOptimization) -> None:
    """Lightning's 50 steps between two lines of the log are more than many an epoch has."""
    trainer = module.trainer
    every = min(trainer.log_every_n_steps, trainer.num_training_batches)
    trainer.log_every_n_steps = int(every)


def _check_overrides(module: ManualOptimization) -> None:
    """
    Raises:
        TrainingError: an override that would never be called, or automatic optimization.
    """
    name = type(module).__name__
    if module.automatic_optimization:
        raise TrainingError(
            f"{name}.automatic_optimization is True, and a PointwiseModule takes its steps of "
            "weights and multipliers by itself. Take that line out."
        )
    for hook, remedy in NEVER_CALLED.items():
        if getattr(type(module), hook) is not getattr(LightningModule, hook):
            raise TrainingError(
                f"{name} overrides {hook}, which is never called under manual optimization. "
                f"{remedy}"
            )


def require_a_step(module: ManualOptimization) -> None:
    """After a training step.

    Raises:
        TrainingError: an override of ``training_step`` that never calls the one it replaces.
    """
    if module.measured is None:
        name = type(module).__name__
        raise TrainingError(
            f"{name}.training_step took no step: neither weights nor multipliers moved. Write "
            "objective() and constraint_values() in its place, or call "
            "super().training_step(batch, batch_idx) in it."
        )


def warn_of_no_step(module: ManualOptimization) -> None:
    """When a fit ends: says so if a module that never took a step took none again."""
    trainer = module.trainer
    if module.measured is None and trainer.ckpt_path is None and not trainer.fast_dev_run:
        module._warn(
            f"No step was taken. The trainer stands at epoch {trainer.current_epoch} of "
            f"{trainer.max_epochs} and step {trainer.global_step} of {trainer.max_steps} (−1: "
            "without end), and its training DataLoader has "
            f"{trainer.num_training_batches} batches. A Trainer that has fitted another module "
            "counts on from there: give each module a Trainer of its own."
        )


def before_zero_grad(module: ManualOptimization) -> None:
    """Calls ``on_before_zero_grad``, which Lightning does under automatic optimization only."""
    optimizer = module.trainer.optimizers[0]
    call._call_callback_hooks(module.trainer, "on_before_zero_grad", optimizer)
    call._call_lightning_module_hook(module.trainer, "on_before_zero_grad", optimizer)


def note_schedulers(module: ManualOptimization) -> dict[int, Any]:
    """Where each scheduler stands."""
    schedulers = [config.scheduler for config in module.trainer.lr_scheduler_configs]
    return {id(each): getattr(each, "last_epoch", None) for each in schedulers}


def check_not_stepped(module: ManualOptimization, known: dict[int, Any]) -> None:
    """
    known: where each scheduler stood after the module's last step of it.

    Raises:
        TrainingError: somebody else stepped one, as manual optimization asks for elsewhere.
    """
    for scheduler, now in note_schedulers(module).items():
        if now != known.get(scheduler, now):
            name = type(module).__name__
            raise TrainingError(
                f"A scheduler of {name} stands at {now}, and the module left it at "
                f"{known[scheduler]}: it steps schedulers by itself, at the interval that "
                "configure_optimizers declares. Take out lr_schedulers().step()."
            )
