"""Constraints under the ``Trainer`` of transformers and the trainers of TRL."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate
from transformers import TrainerCallback

from .constraint import Constraint
from .data import without_index
from .data.fingerprints import fingerprint_of_content
from .errors import TrainingError, Words
from .formulations import Formulation, Pointwise
from .lagrangian.checks import Door
from .lagrangian.group_means import worst_mean
from .lagrangian.lagrangian import Lagrangian
from .lagrangian.terms import (
    OBJECTIVE,
    build_terms,
    carries,
    group_numbers,
    masks_from,
    shape_of,
)
from .loss import PointwiseLoss
from .printing import say
from .report.closing_table import Conditions, HeldOut
from .trainer_checkpoints import FILE as FILE
from .trainer_checkpoints import (
    MARK,
    last_whole_checkpoint,
    load_multipliers,
    new_mark,
    write_multipliers,
)
from .trainer_settings import (
    refuse_arguments,
    refuse_order,
    refuse_sharding,
    with_index,
)

WORDS = Words(
    objective="The objective of terms()",
    values="The values of terms()",
    masks="The masks of terms()",
    index="The column index",
    owner="trainer.constrained",
)
OF_TERMS = Door(
    objective="terms() and the model", values="terms() and the model", words=WORDS
)
"""How errors call what a class with the mix-in defines."""


class PointwiseTrainerMixin:
    """A trainer whose loss is an objective under constraints, with a multiplier for every sample.

    ::

        class BudgetTrainer(PointwiseTrainerMixin, Trainer):
            def terms(self, model, inputs):
                logits = model(input_ids=inputs["input_ids"]).logits
                ...
                return learnt, {"kl": kl}  # (B,) and (B,) or (B, K)

        trainer = BudgetTrainer(
            model=model, args=args, train_dataset=rows,
            constraints={"kl": Constraint(at_most=0.1)}, formulation=Pointwise(),
        )

    λ is in every checkpoint, and a resume goes on with it; ``True`` takes the last whole one. The
    rows of ``train_dataset`` get ``index``, their position, which collators and ``terms`` need not
    handle. Accumulated steps are one step of λ. In evaluation the loss is the mean objective. Logs
    say how the requirements stand, and training ends with the table of
    :meth:`~pl_pointwise.loss.PointwiseLoss.report`.

    Args:
        constraints, formulation, groups: as those of :class:`~pl_pointwise.loss.PointwiseLoss`.
        eval_groups: the group of each row of ``eval_dataset``, where bounds are on means of
            groups; without it each of them is judged by itself.

    Attributes:
        columns: names of columns of the rows, such as the one that says which samples have a
            requirement. ``terms`` and ``masks`` find them in ``inputs`` as tensors (B,), in
            training and evaluation, also where the trainer drops them or its collator does not
            know them.
        constrained: the PointwiseLoss; ``constrained.multipliers`` is λ.

    Raises:
        TrainingError: a checkpoint without λ, of another training set, or of files of two savings;
            settings under which a sample has no row of its own, or a term no gradient: packing,
            online RL, several data sets, DeepSpeed, FSDP1, DDP's static graph.

    .. versionadded:: 0.3.0
    """

    columns: Sequence[str] = ()
    constrained: PointwiseLoss

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_order(cls)

    def __init__(
        self,
        *args: Any,
        constraints: Mapping[str, Constraint],
        formulation: Formulation | Mapping[str, Formulation] | None,
        groups: Sequence[int] | Tensor | None = None,
        eval_groups: Sequence[int] | Tensor | None = None,
        **options: Any,
    ) -> None:
        # It raises, before a model is moved or data are read.
        if type(self).terms is PointwiseTrainerMixin.terms:
            self.terms(None, {})
        refuse_arguments(type(self), args, options)
        super().__init__(*args, **options)
        trainer: Any = self
        refuse_sharding(trainer)
        samples: int | None = None
        self._fingerprint: str | None = None
        rows = trainer.train_dataset
        # A stream has no positions, so no sample of it can have a λ.
        if hasattr(rows, "__len__") and not isinstance(rows, IterableDataset):
            trainer.train_dataset = with_index(rows)
            samples = len(rows)
            self._fingerprint = fingerprint_of_content(without_index(rows))
        self._new_loss = partial(
            _LossOfTerms,
            constraints,
            formulation,
            samples=samples,
            groups=groups,
            parameters=partial(_model_of, trainer),
        )
        self._begin_multipliers()
        self._held_out: dict[str, list[Tensor]] = {}  # Of the last evaluation, by term.
        self._eval_groups = eval_groups
        # Of all micro-batches of a step, by term.
        self._counts: dict[str, int] | None = None
        trainer.data_collator = _WithIndex(trainer.data_collator, self.columns)
        # A mean over the samples of a micro-batch: the trainer divides it by their number. The
        # first is read since transformers 5.19, the second before.
        trainer.loss_is_scaled_for_ga = False
        trainer.model_accepts_loss_kwargs = False
        trainer.add_callback(_Steps(trainer))

    @property
    def _lagrangian(self) -> Lagrangian:
        """The engine, as a module has it."""
        return self.constrained._lagrangian

    def _begin_multipliers(self) -> None:
        """λ = 0 of this training set."""
        self.constrained = self._new_loss()
        self.constrained.fingerprint = self._fingerprint

    def terms(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """ℓ₀ (B,), ℓ_k by constraint (B,) or (B, K), and masks by term if some apply to a part.

        Called in training and evaluation; values, not yet violations. Masks are bool (B,), under
        the names of the constraints and "objective"; without them those of :meth:`masks` are taken.
        """
        raise TrainingError(
            f"{type(self).__name__} has no terms(model, inputs): define it; it returns the "
            "objective (B,) and a dict of values by constraint."
        )

    def masks(self, inputs: dict[str, Any]) -> Mapping[str, Tensor] | None:
        """The masks of ``terms``, from a batch alone; None where it cannot tell them.

        With it, accumulated micro-batches in which a term applies to more or fewer samples are one
        batch of all; without it every micro-batch weighs the same.
        """
        return None

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """The loss of a batch, as the trainer asks for it."""
        # A copy, as the trainer may use the batch again.
        batch, inputs = inputs, dict(inputs)
        index = inputs.pop("index", None)
        outputs: dict[str, Any] = {}
        with _first_output(model, outputs) if return_outputs else nullcontext():
            objective, values, masks = self._terms_of(model, inputs, batch)
        if torch.is_grad_enabled() and model.training:
            if index is None and self._lagrangian.samples:
                raise TrainingError(
                    'A batch has no "index", so no sample has its multiplier: let the loader and '
                    "its collator be those of the trainer, and train_dataset what it was made with."
                )
            if index is None:  # A stream, of which no sample comes twice.
                index = torch.arange(len(objective))
            loss = self.constrained(
                objective, values, index, masks=masks, counts=self._counts
            )
            # A part of one batch's, and the trainer divides.
            if self._counts is not None:
                loss = loss * self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
        else:
            carried = self._keep_held_out(objective, values, masks)
            applied = objective[carried]
            # A mean of nothing would be NaN, and with it that of the whole evaluation.
            loss = applied.mean() if len(applied) else objective.sum() * 0
        return (
            (loss, outputs or {"objective": objective.detach()})
            if return_outputs
            else loss
        )

    def _terms_of(
        self, model: Any, inputs: dict[str, Any], batch: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Objective, values and masks by term of what ``terms`` returns; refuses another form.

        batch: ``inputs`` with the index, as ``masks`` gets it before the first forward pass.
        """
        returned = self.terms(model, inputs)
        in_a_row = isinstance(returned, (tuple, list))
        if not in_a_row or len(returned) not in (2, 3):
            form = f"{len(returned)} things" if in_a_row else "no tuple"
            kind = type(returned).__name__
            raise TrainingError(
                f"{type(self).__name__}.terms() returned {form} ({kind}): return "
                "the objective (B,), a dict of values by constraint, and a dict of masks if needed."
            )
        objective, values = returned[:2]
        masks = returned[2] if len(returned) == 3 else None
        # Who defines masks() need not return them a second time.
        if masks is None:
            masks = self.masks(batch)
        return objective, values, masks or {}

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> Any:
        """As the trainer's: predictions are what the model returns, as its metrics expect."""
        # A model's forward refuses an argument that it does not know.
        if isinstance(inputs, Mapping):
            inputs = {name: value for name, value in inputs.items() if name != "index"}
        parent: Any = super()
        return parent.prediction_step(model, inputs, *args, **options)

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """The micro-batches of a step, of which :meth:`masks` tells how many a term applies to."""
        parent: Any = super()
        batches, *others = parent.get_batch_samples(*args, **options)
        self._counts = self._counts_of(batches)
        return (batches, *others)

    def _counts_of(self, batches: Sequence[Any]) -> dict[str, int] | None:
        of_batches = [self.masks(batch) for batch in batches]
        # One that cannot tell is enough: a count is of all micro-batches.
        if not batches or any(masks is None for masks in of_batches):
            return None
        counts = dict.fromkeys([OBJECTIVE, *self._lagrangian.constraints], 0)
        words = replace(WORDS, masks="masks()")
        for batch, masks in zip(batches, of_batches, strict=True):
            index, cpu = batch["index"].cpu(), torch.device("cpu")
            by_term, _ = masks_from(masks or {}, index, counts, cpu, words)
            for name in counts:
                counts[name] += int(carries(by_term[name]).sum())
        return counts

    def train(
        self, resume_from_checkpoint: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Trains; λ goes on from the checkpoint that is resumed."""
        trainer: Any = self
        # A model made anew, as of every trial of a search.
        if trainer.model_init is not None:
            self._begin_multipliers()
        self.constrained.skip()  # What a run that was broken off has left.
        if resume_from_checkpoint is True:
            # Where there is none the trainer says so.
            resume_from_checkpoint = (
                last_whole_checkpoint(trainer.args.output_dir) or True
            )
        if resume_from_checkpoint and resume_from_checkpoint is not True:
            state = load_multipliers(Path(resume_from_checkpoint))
            self.constrained.load_state_dict(state)
        parent: Any = super()
        return parent.train(resume_from_checkpoint, *args, **options)

    # In a checkpoint -----------------------------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **options: Any) -> Any:
        """λ is written with the rest, before older checkpoints go, and marked as of this saving."""
        trainer: Any = self
        folder = Path(trainer._get_output_dir(trial=_trial_of(args, options)))
        folder = folder / f"checkpoint-{trainer.state.global_step}"
        mark = new_mark()
        if trainer.args.should_save:
            # That of another run must not stand beside these weights.
            (folder / FILE).unlink(missing_ok=True)
        trainer.state.stateful_callbacks[MARK] = mark
        self._saving = folder, mark
        parent: Any = super()
        return parent._save_checkpoint(*args, **options)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        parent: Any = super()
        parent._save_optimizer_and_scheduler(output_dir)
        self._save_multipliers(Path(output_dir))

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Saves the model; in a checkpoint of the model alone, λ too."""
        parent: Any = super()
        parent.save_model(output_dir, _internal_call=_internal_call)
        trainer: Any = self
        # Any other checkpoint got λ in _save_optimizer_and_scheduler, which is not called for this
        # one.
        if _internal_call and output_dir and trainer.args.save_only_model:
            self._save_multipliers(Path(output_dir))

    def _save_multipliers(self, folder: Path) -> None:
        trainer: Any = self
        state = self.constrained.state_dict()
        asked, mark = getattr(self, "_saving", (None, None))
        if asked is not None and asked.resolve() == folder.resolve():
            state |= {MARK: mark, "weights": None}  # The mark tells more.
        if trainer.args.should_save:
            write_multipliers(state, folder)

    def _load_best_model(self) -> None:
        """λ and all that moves it are those of the best step, too."""
        trainer: Any = self
        parent: Any = super()
        parent._load_best_model()
        folder = Path(trainer.state.best_model_checkpoint)
        if (folder / FILE).is_file():
            self.constrained.load_state_dict(load_multipliers(folder))

    # What is logged, and the end of training -----------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Adds how the requirements stand to a log of the loss, which grows while λ does.

        Of all samples at their last visit: "objective", and of every constraint "NAME/violated", a
        share, "NAME/worst" in the unit of the bound, and "NAME/multiplier_max".
        """
        if "loss" in logs:
            logs |= self._totals()
        parent: Any = super()
        parent.log(logs, *args, **options)

    def _totals(self) -> dict[str, float]:
        lagrangian = self._lagrangian
        history = lagrangian.history
        history.read()
        totals = {"objective": history.totals()["objective"]}
        for name, table in history.last.items():
            totals |= _summary(name, lagrangian.constraints[name], table)
            multiplier = lagrangian.multipliers.get(name)
            if multiplier is not None and multiplier.numel():
                totals[f"{name}/multiplier_max"] = float(multiplier.abs().max())
        return totals

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Adds "eval_objective" and of every constraint "eval_NAME/violated" and "/worst"."""
        self._held_out = {}
        parent: Any = super()
        output = parent.evaluation_loop(*args, **options)
        # The fifth argument of the trainer's own evaluation_loop.
        prefix = options.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        for name in self._by_group:
            if name in self._held_out:
                residual = torch.cat(self._held_out[name])
                groups = group_numbers(self._eval_groups, len(residual), "eval_groups")
                constraint = self._lagrangian.constraints[name]
                self._held_out[name] = [worst_mean(constraint, residual, groups)]
        for name, parts in self._held_out.items():
            if name == OBJECTIVE:
                shown = {name: float(torch.cat(parts).nanmean())}
            else:
                shown = _summary(
                    name, self._lagrangian.constraints[name], torch.cat(parts)
                )
            for key, value in shown.items():
                output.metrics[f"{prefix}_{key}"] = value
        return output

    @property
    def _by_group(self) -> list[str]:
        """The constraints that an evaluation judges by the mean of each group."""
        return [] if self._eval_groups is None else self._lagrangian.bounds_on_means

    def _keep_held_out(
        self,
        objective: Tensor,
        values: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
    ) -> Tensor:
        """Keeps an evaluated batch's values by sample: NaN where a term does not apply.

        Returns the samples that the objective applies to, bool (B,).
        """
        trainer: Any = self
        if not isinstance(objective, Tensor) or objective.dim() != 1:
            raise TrainingError(
                f"{WORDS.objective} must have one value per sample, shape (B,), got "
                f"{shape_of(objective)}: do not reduce over the batch."
            )
        # Held-out samples have no λ to look up: any index will do.
        index = torch.arange(len(objective))
        names = [OBJECTIVE, *self._lagrangian.constraints]
        masks, whole = masks_from(masks, index, names, objective.device, WORDS)
        bounds = self._lagrangian.constraints
        # A signed formulation alone leaves ℓ − c its sign, without which a mean over a group is
        # none.
        signs = Pointwise(alpha=None).for_equality()
        equalities = [name for name in self._by_group if bounds[name].is_equality]
        signed = dict.fromkeys(equalities, signs)
        terms = build_terms(
            bounds,
            signed,
            masks,
            objective.detach(),
            values,
            judge=None,
            whole=whole,
            words=WORDS,
        )
        carried = terms.masks[OBJECTIVE]
        tables = {OBJECTIVE: terms.objective.masked_fill(~carried, math.nan)}
        for name, violation in terms.judged.items():
            mask = terms.masks[name]
            if name in self._by_group:
                # The mean of a group comes first, and its worst column then.
                tables[name] = violation.masked_fill(~mask, math.nan)
                continue
            worst = violation.masked_fill(~mask, -math.inf).amax(1)
            tables[name] = worst.masked_fill(~mask.any(1), math.nan)
        for name, table in tables.items():
            # Of all ranks, without the samples that only fill the last batch.
            table = trainer.accelerator.gather_for_metrics(table)
            self._held_out.setdefault(name, []).append(table.float().cpu())
        return carried

    def _close(self) -> None:
        """Prints the closing table."""
        trainer: Any = self
        held_out = None
        worst = {name: torch.cat(parts) for name, parts in self._held_out.items()}
        if worst:
            objective = float(worst.pop(OBJECTIVE).nanmean())
            held_out = HeldOut(self._lagrangian.constraints, worst, objective)
        conditions = Conditions(
            rate=trainer.args.learning_rate, longer="raise num_train_epochs"
        )
        closing = self._lagrangian.closing(held_out, conditions)
        if trainer.is_world_process_zero():
            say(f"\n{closing}\n")

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps ``index`` and ``columns`` among those that reach the collator."""
        parent: Any = super()
        parent._set_signature_columns_if_needed()
        trainer: Any = self
        known = trainer._signature_columns
        added = [name for name in ("index", *self.columns) if name not in known]
        trainer._signature_columns = [*known, *added]


def _summary(name: str, constraint: Constraint, worst: Tensor) -> dict[str, float]:
    """Of the largest violation of each sample, (n,); NaN where none applies."""
    worst = worst[~worst.isnan()]
    if not len(worst):
        return {}
    return {
        f"{name}/violated": float((worst > 0).float().mean()),
        f"{name}/worst": constraint.value_at(float(worst.max())),
    }


class _WithIndex:
    """A collator that sees rows without ``index``, of which the batch has a tensor.

    columns: what else of the rows the batch gets as tensors (B,), if their collator does not give
    it.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], columns: Sequence[str] = ()
    ) -> None:
        self.collate = collate
        self.columns = columns

    def __call__(self, rows: list[Mapping[str, Any]]) -> Any:
        index = [row["index"] for row in rows if "index" in row]
        columns = {name: self._column(name, rows) for name in self.columns}
        batch = self.collate([_without(row, "index", *self.columns) for row in rows])
        batch.update(columns)
        # Rows of train_dataset have one, and those of an evaluation none.
        if len(index) == len(rows):
            batch["index"] = torch.tensor(index)
        return batch

    def _column(self, name: str, rows: list[Mapping[str, Any]]) -> Tensor:
        for row in rows:
            if name not in row:
                raise TrainingError(
                    f'columns names "{name}", and a row has only '
                    f"{', '.join(map(repr, without_position(row)))}: add it to the data set, for "
                    "training and evaluation."
                )
        values = default_collate([row[name] for row in rows])
        if not isinstance(values, Tensor):
            raise TrainingError(
                f'columns names "{name}", whose values are no numbers: a column is of numbers or '
                'of True and False, as [role == "refuse" for role in roles].'
            )
        return values

    def __getattr__(self, name: str) -> Any:
        """What a trainer asks its collator for, such as its tokenizer."""
        if name in ("collate", "columns"):  # While it is unpickled in a worker.
            raise AttributeError(name)
        return getattr(self.collate, name)


def without_position(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it was given."""
    return _without(row, "index")


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


@contextmanager
def _first_output(model: Any, outputs: dict[str, Any]) -> Iterator[None]:
    """Keeps what the model's first forward pass returns, by name, as its metrics expect it."""

    def keep(_: Any, inputs: Any, returned: Any) -> None:
        if outputs:
            return
        # Models of transformers return one of these three.
        if isinstance(returned, Mapping):
            outputs.update(returned)
        elif isinstance(returned, Tensor):
            outputs["logits"] = returned
        elif isinstance(returned, (tuple, list)):
            for position, output in enumerate(returned):
                outputs[f"output_{position}"] = output

    handle = model.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _model_of(trainer: Any) -> Any:
    """The model of now, which ``model_init`` makes anew; the sharded one where it is."""
    return trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.model


class _LossOfTerms(PointwiseLoss):
    """Whose errors speak of ``terms()``."""

    _door = OF_TERMS


def _trial_of(args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return options.get("trial", args[1] if len(args) > 1 else None)


class _Steps(TrainerCallback):
    """The dual step after that of the weights, and the closing table."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.constrained.total_steps = state.max_steps

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.trainer.constrained.skip()
        else:
            self.trainer.constrained.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._close()
