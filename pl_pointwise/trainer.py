"""Constraints under the ``Trainer`` of transformers and the trainers of TRL."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from .constraint import Constraint
from .data import IndexedDataset
from .errors import TrainingError
from .formulations import Formulation
from .lagrangian.terms import OBJECTIVE, build_terms, masks_from
from .loss import PointwiseLoss
from .printing import say
from .report.closing import Conditions, HeldOut

FILE = "pointwise.pt"
"""Of the multipliers, in the folder of a checkpoint."""


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

    λ is in every checkpoint, and a resume goes on with it. The rows of ``train_dataset`` get
    ``index``, their position, which collators and ``terms`` need not handle. Accumulated steps are
    one step of λ. In evaluation the loss is the mean objective. Logs say how the requirements
    stand, and training ends with the table of :meth:`~pl_pointwise.loss.PointwiseLoss.report`.

    Args:
        constraints, formulation, groups: as those of :class:`~pl_pointwise.loss.PointwiseLoss`.

    Attributes:
        constrained: the PointwiseLoss; ``constrained.multipliers`` is λ.

    Raises:
        TrainingError: a checkpoint without λ, or of another number of samples; DeepSpeed and FSDP,
            whose sharded weights have no gradient of one term.
    """

    constrained: PointwiseLoss

    def __init__(
        self,
        *args: Any,
        constraints: Mapping[str, Constraint],
        formulation: Formulation | Mapping[str, Formulation] | None,
        groups: Sequence[int] | Tensor | None = None,
        **options: Any,
    ) -> None:
        if type(self).terms is PointwiseTrainerMixin.terms:
            self.terms(None, {})
        super().__init__(*args, **options)
        trainer: Any = self
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise TrainingError("Sharded weights: train with PointwiseModule, which takes FSDP2.")
        samples, rows = None, trainer.train_dataset
        if hasattr(rows, "__len__") and not isinstance(rows, IterableDataset):
            samples = len(rows)
            if not hasattr(rows, "add_column"):
                trainer.train_dataset = IndexedDataset(rows)
            elif "index" in rows.column_names:
                raise TrainingError(
                    'train_dataset has a column "index", which is the position: rename it.'
                )
            else:
                trainer.train_dataset = rows.add_column("index", list(range(samples)))
        self.constrained = PointwiseLoss(
            constraints,
            formulation,
            samples=samples,
            groups=groups,
            parameters=[p for p in trainer.model.parameters() if p.requires_grad],
        )
        self._held_out: dict[str, list[Tensor]] = {}  # Of the last evaluation, by term.
        trainer.data_collator = _WithIndex(trainer.data_collator)
        trainer.loss_is_scaled_for_ga = False  # A mean over the samples of a micro-batch.
        trainer.add_callback(_Steps(trainer))

    def terms(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """ℓ₀ (B,), ℓ_k by constraint (B,) or (B, K), and masks by term if some apply to a part.

        Called in training and evaluation; values, not yet violations.
        """
        raise TrainingError(
            f"{type(self).__name__} has no terms(model, inputs): define it; it returns the "
            "objective (B,) and a dict of values by constraint."
        )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """The loss of a batch, as the trainer asks for it."""
        inputs = dict(inputs)
        index = inputs.pop("index", None)
        objective, values, *masks = self.terms(model, inputs)
        if torch.is_grad_enabled() and model.training:
            if index is None and self.constrained.samples:
                raise TrainingError(
                    'A batch has no "index", so no sample has its multiplier: let the loader and '
                    "its collator be those of the trainer."
                )
            if index is None:  # A stream, of which no sample comes twice.
                index = torch.arange(len(objective))
            loss = self.constrained(objective, values, index, masks=masks[0] if masks else None)
        else:
            loss = objective.mean()
            self._keep_held_out(objective, values, masks[0] if masks else {})
        return (loss, {"objective": objective.detach()}) if return_outputs else loss

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Trains; λ goes on from the checkpoint that is resumed."""
        trainer: Any = self
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(trainer.args.output_dir)
        if folder:
            path = Path(folder, FILE)
            if not path.is_file():
                raise TrainingError(f"{path} is missing: this checkpoint has no multipliers.")
            try:
                state = torch.load(path, weights_only=True)
            except Exception as error:  # What reading a damaged pickle raises has no base.
                raise TrainingError(f"{path} is damaged; nothing of it was run.") from error
            self.constrained.load_state_dict(state)
        parent: Any = super()
        return parent.train(resume_from_checkpoint, *args, **options)

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
        constrained = self.constrained
        history = constrained.history
        history.read()
        found = {"objective": history.totals()["objective"]}
        for name, table in history.last.items():
            found |= _summary(name, constrained.constraints[name], table)
            multiplier = constrained.multipliers.get(name)
            if multiplier is not None and multiplier.numel():
                found[f"{name}/multiplier_max"] = float(multiplier.abs().max())
        return found

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Adds "eval_objective" and of every constraint "eval_NAME/violated" and "/worst"."""
        self._held_out = {}
        parent: Any = super()
        output = parent.evaluation_loop(*args, **options)
        prefix = options.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        for name, parts in self._held_out.items():
            if name == OBJECTIVE:
                found = {name: float(torch.cat(parts).nanmean())}
            else:
                found = _summary(name, self.constrained.constraints[name], torch.cat(parts))
            output.metrics.update({f"{prefix}_{key}": value for key, value in found.items()})
        return output

    def _keep_held_out(
        self, objective: Tensor, values: Mapping[str, Tensor], masks: Mapping[str, Tensor]
    ) -> None:
        """Keeps an evaluated batch's values by sample: NaN where a term does not apply."""
        trainer: Any = self
        index = torch.arange(len(objective))
        names = [OBJECTIVE, *self.constrained.constraints]
        masks, whole = masks_from(masks, index, names, objective.device)
        terms = build_terms(
            self.constrained.constraints, {}, masks, objective.detach(), values, None, whole
        )
        carried = terms.masks[OBJECTIVE]
        found = {OBJECTIVE: terms.objective.masked_fill(~carried, math.nan)}
        for name, violation in terms.judged.items():
            mask = terms.masks[name]
            worst = violation.masked_fill(~mask, -math.inf).amax(1)
            found[name] = worst.masked_fill(~mask.any(1), math.nan)
        for name, table in found.items():
            # Of all ranks, without the samples that only fill the last batch.
            table = trainer.accelerator.gather_for_metrics(table)
            self._held_out.setdefault(name, []).append(table.float().cpu())

    def _close(self) -> None:
        """Prints the closing table."""
        trainer: Any = self
        held_out = None
        worst = {name: torch.cat(parts) for name, parts in self._held_out.items()}
        if worst:
            objective = float(worst.pop(OBJECTIVE).nanmean())
            held_out = HeldOut(self.constrained.constraints, worst, objective)
        conditions = Conditions(rate=trainer.args.learning_rate, longer="raise num_train_epochs")
        closing = self.constrained.closing(held_out, conditions)
        if trainer.is_world_process_zero():
            say(f"\n{closing}\n")

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps ``index`` among the columns that reach the collator."""
        parent: Any = super()
        parent._set_signature_columns_if_needed()
        trainer: Any = self
        if "index" not in trainer._signature_columns:
            trainer._signature_columns = [*trainer._signature_columns, "index"]


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
    """A collator that sees rows without ``index``, of which the batch has a tensor."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Mapping[str, Any]]) -> Any:
        index = [row["index"] for row in rows if "index" in row]
        without = [{k: v for k, v in row.items() if k != "index"} for row in rows]
        batch = self.collate(without)
        if len(index) == len(rows):
            batch["index"] = torch.tensor(index)
        return batch

    def __getattr__(self, name: str) -> Any:
        """What a trainer asks its collator for, such as its tokenizer."""
        if name == "collate":  # While it is unpickled in a worker.
            raise AttributeError(name)
        return getattr(self.collate, name)


class _Steps(TrainerCallback):
    """The dual step after that of the weights, and λ in the checkpoints."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.trainer.constrained.skip()
        else:
            self.trainer.constrained.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer._close()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            part = folder / f"{FILE}.part"
            torch.save(self.trainer.constrained.state_dict(), part)
            os.replace(part, folder / FILE)
