"""The base module: a task's terms, steps (stepper.py), λ (lagrangian.py) and a run (run.py)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from .constraint import Constraint
from .evaluation import Evaluator, SampleValues, SampleViolations
from .formulations import Formulation
from .lagrangian.declared import declared_constraints, formulations_from
from .lagrangian.lagrangian import Lagrangian
from .lagrangian.prices import Prices
from .lagrangian.terms import DualStep, Measured
from .multipliers import Multipliers
from .optimizers import Training, keeping_monitors
from .plain import from_plain, plain_arguments
from .report.closing_table import Closing
from .task import Notes, Task, warn
from .training.checkpoints import constructor_frame
from .training.checks import check_trained
from .training.mistakes import explain_own_error
from .training.run import OF_MODULE, Run
from .training.stepper import Stepper

# Not None: jsonargparse would then hand None to a task that has a default of its own.
DEFAULT_TRAINING = Training()


def annotate(constructor: Any) -> None:
    """Types ``formulation`` and ``training`` of a task's constructor where the task does not.

    Of an argument without a type the command line's parser takes the last configuration's value
    whole, so that a method that gives ``init_args`` alone would lose the class.
    """
    annotations = getattr(constructor, "__annotations__", None)
    if annotations is None or not inspect.isfunction(constructor):
        return
    types: dict[str, Any] = {
        "formulation": Formulation | dict[str, Formulation] | None,
        "training": Training | None,
    }
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in types and parameter.annotation is inspect.Parameter.empty:
            annotations[name] = types[name]


def _held_by(part: str, name: str) -> Any:
    """An attribute of the module that one of its parts holds, and only that part sets."""
    return property(lambda module: getattr(vars(module)[part], name))


HOOKS = (
    "configure_callbacks",
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_validation_model_zero_grad",
    "on_validation_epoch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_test_epoch_start",
    "on_test_batch_end",
    "on_test_epoch_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
)
"""Lightning's hooks in which the base module does something, in methods of :class:`Run`."""


def _with_run(module: PointwiseModule, hook: str, *args: Any, **named: Any) -> Any:
    """Calls a hook and what the base module does in it, which needs no ``super()`` in overrides."""
    of_run = getattr(module._run, hook)
    of_module = getattr(type(module), hook)
    if hook == "on_train_epoch_end":  # A scheduler may monitor what an override logs.
        result = of_module(module, *args, **named)
        of_run(*args, **named)
        return result
    of_run(*args, **named)
    return of_module(module, *args, **named)


class PointwiseModule(Task):
    """Fine-tuning under constraints; a task is a subclass with three methods.

    >>> from pl_pointwise import Constraint, Formulation, Pointwise, PointwiseModule
    >>> class MyModule(PointwiseModule):
    ...     def __init__(self, formulation: Formulation | None, tolerance: float = 0.1):
    ...         super().__init__(
    ...             formulation=formulation, constraints={"fit": Constraint(at_most=tolerance)}
    ...         )
    ...         self.net = torch.nn.Linear(4, 1)
    ...     def forward(self, batch):
    ...         return self.net(batch["x"])[:, 0]
    ...     def objective(self, outputs, batch):
    ...         return outputs.abs()
    ...     def constraint_values(self, outputs, batch):
    ...         return {"fit": (outputs - batch["y"]).square()}
    >>> module = MyModule(Pointwise())  # Trainer(max_epochs=30).fit(module, data)

    A batch of the training DataLoader is one optimisation step. In this order: ``membership``; per
    micro-batch ``forward`` once, ``objective``, ``constraint_values`` and the backward pass; the
    step of the weights; that of the batch's multipliers. In some steps of an adaptive α one more
    pass per term measures its unit.

    A batch is a mapping with ``index``, (B,), each sample's position in the training set, or a list
    of such micro-batches.

    Args:
        formulation: one for all constraints, one for each by name, or None for plain training.
            ``{class_path, init_args}`` stands for the object.
        constraints: by name.
        evaluation_constraints: the bounds by which ``validate`` and ``test`` measure violations;
            a name left out takes ``constraints``'.
        training: how it is trained: optimizer, micro-batches, clipping, order of the steps.

    Raises:
        ValueError: constraints and formulations whose names differ; a name that is "objective" or
            has a slash.

    Attributes:
        training_settings: ``training``, a copy.
        multipliers: λ by constraint, (N, K) float32 in training-set order, of groups (G, K); () for
            :class:`~pl_pointwise.formulations.Average` and the other statistics of the batch.
        prices: what each requirement costs, by constraint: the force on it, averaged over the
            later part of the last fit; :class:`~pl_pointwise.lagrangian.prices.Prices`.
        thresholds: t by constraint of :class:`~pl_pointwise.formulations.CVaR`, () or (2,).
        violations, evaluated: by stage and constraint, after ``validate`` or ``test``: all values,
            1-D on the CPU, and the same sample by sample.
        evaluated_metrics: the same of the metrics that are a
            :class:`~pl_pointwise.evaluation.MeanBySample`.
        measured: what the last training step measured, of all ranks; None before the first.
            ``judged`` are the violations that multipliers follow and reports show (of
            ``strict_values``, if given), ``followed`` those that the weights follow.
        dual_steps: the dual step it ended in, by constraint; empty where it took none.
        closing: the closing table of the last fit, which it printed; None before its end.
        shared_objective: the metric that says the objective of every method of the task.
        shared_violation: the one that `compare` draws against it; "": the share that violates.
    """

    multipliers: Multipliers = _held_by("_lagrangian", "multipliers")
    thresholds: dict[str, Tensor] = _held_by("_lagrangian", "thresholds")
    measured: Measured | None = _held_by("_lagrangian", "measured")
    dual_steps: dict[str, DualStep] = _held_by("_lagrangian", "dual_steps")
    violations: dict[str, dict[str, Tensor]] = _held_by("_evaluator", "violations")
    evaluated: dict[str, dict[str, SampleViolations]] = _held_by(
        "_evaluator", "evaluated"
    )
    evaluated_metrics: dict[str, dict[str, SampleValues]] = _held_by(
        "_evaluator", "evaluated_metrics"
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Of a class's own alone: an inherited one was done with its class.
        if "__init__" in vars(cls):
            annotate(vars(cls)["__init__"])
        if "configure_optimizers" in vars(cls):
            configure: Any = keeping_monitors(cls.configure_optimizers)
            cls.configure_optimizers = configure  # type: ignore[method-assign]

    def __init__(
        self,
        formulation: Formulation | dict[str, Formulation] | None,
        constraints: dict[str, Constraint],
        evaluation_constraints: dict[str, Constraint] | None = None,
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.constraints, self.evaluation_constraints = declared_constraints(
            constraints, evaluation_constraints
        )
        settings = deepcopy(from_plain(Training, training))
        self.training_settings = settings

        self.closing: Closing | None = None
        self._notes = Notes()
        formulations = formulations_from(formulation, self.constraints)
        self.formulations = dict(formulations)
        self._lagrangian = Lagrangian(
            self.constraints,
            formulations,
            samples=0,  # Until a fit knows them, as it does the groups.
            groups=None,
            primal_steps=settings.primal_steps,
            dual_first=settings.order == "dual_first",
            total_steps=None,
            warn=partial(warn, self),
            door=OF_MODULE,
        )
        self._stepper = Stepper(self, self._lagrangian)
        self._evaluator = Evaluator(self)
        self._run = Run(self, self._lagrangian, self._stepper, self._evaluator)
        for hook in HOOKS:
            setattr(self, hook, partial(_with_run, self, hook))
        self.save_hyperparameters(frame=constructor_frame(self))

    def _attach(self, trainer: Any) -> None:
        """Tells callbacks too, before the trainer looks for a checkpoint: see SaveOnTermination."""
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        for callback in getattr(trainer, "callbacks", []):
            if hasattr(callback, "on_module_attached"):
                callback.on_module_attached(trainer, self)

    @property
    def prices(self) -> Prices:
        history = self._lagrangian.history
        history.read()
        return history.prices

    trainer: Any = LightningModule.trainer.setter(_attach)  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """One step of both; returns mean ℓ₀ + Σ mean ψ(v, λ) of all ranks, without a gradient."""
        self._run.open_step(batch_idx)
        try:
            measured = self._stepper.take(batch)
        except Exception as error:
            explain_own_error(self, batch, error)
            raise
        self._stepper.log()
        self._run.step_schedulers("step")
        return torch.tensor(measured.lagrangian)

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        try:
            self._evaluator.add(batch, dataloader_idx)
        except Exception as error:
            explain_own_error(self, batch, error)
            raise

    test_step = validation_step

    # What callbacks ask for ---------------------------------------------------------------------

    def in_force(self, name: str) -> Formulation:
        """The formulation of a constraint with α and η as numbers: of the last training step.

        Its ``slope(violation, multiplier)`` is the force on a value, its ``relaxation`` (of
        :class:`~pl_pointwise.formulations.Relaxed`) how far that relaxes its bound.

        Args:
            name: the constraint.

        Raises:
            KeyError: a constraint that is not enforced.
        """
        return self._lagrangian.formulation_of_now(name)

    def forces(self, name: str) -> Tensor:
        """∂ψ/∂v of the samples of the last training step, (R, sides·K), as ``measured.index``.

        Positive pushes the value towards its bound, of an equality either sign; 0 where a mask or a
        share leaves a sample out. Of groups whose means are bounded it is the force on the mean,
        alike for each of its samples. ``prices`` is its average over the later part of a run.

        Args:
            name: the constraint.

        Raises:
            ValueError: a constraint on a statistic of the batch, whose one λ is
                ``multipliers[name]``, or that is not enforced; no step yet.
        """
        return self._lagrangian.forces(name)

    # Optimizers and devices ---------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        check_trained(self)
        trainable = [p for p in self.parameters() if p.requires_grad]
        settings = self.training_settings.optimization
        optimizer = torch.optim.AdamW(
            trainable,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            # One pass over the weights; on a CPU a sixth of the plain one's time.
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: self._run.factor(s)
        )
        by_step = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": by_step}  # type: ignore[return-value]

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Moves a batch, all but its ``host_keys``."""
        if isinstance(batch, (list, tuple)):
            return [
                self.transfer_batch_to_device(b, device, dataloader_idx) for b in batch
            ]
        if not isinstance(batch, Mapping):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        on_host = {key: value for key, value in batch.items() if key in self.host_keys}
        to_move = {
            key: value for key, value in batch.items() if key not in self.host_keys
        }
        return {
            **super().transfer_batch_to_device(to_move, device, dataloader_idx),
            **on_host,
        }

    # Checkpoints --------------------------------------------------------------------------------

    def _set_hparams(self, hp: Any) -> None:
        kept, self._run.arguments_left_out = plain_arguments(hp)
        super()._set_hparams(kept)
