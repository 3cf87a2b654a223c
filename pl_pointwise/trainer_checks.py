"""What of Lightning's ways a module that steps by itself cannot follow; refused, not ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from .errors import TrainingError

if TYPE_CHECKING:
    from .manual_optimization import ManualOptimization

NEVER_CALLED = {
    "optimizer_step": "Change learning rates in a scheduler of configure_optimizers, or look at "
    "gradients in on_before_optimizer_step, which is called.",
    "configure_gradient_clipping": "Set Training(gradient_clip_val=…), or change gradients in "
    "on_before_optimizer_step.",
    "optimizer_zero_grad": "The gradients of a step begin at zero; look at those of the last one "
    "in on_before_optimizer_step.",
}
"""Hooks that Lightning calls under automatic optimization only, with what to do instead."""


def check_overrides(module: ManualOptimization) -> None:
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
