"""Constraints under the ``Trainer`` of transformers and the trainers of TRL."""

from __future__ import annotations

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
from .loss import PointwiseLoss

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
    one step of λ. In evaluation the loss is the mean objective.

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

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps ``index`` among the columns that reach the collator."""
        parent: Any = super()
        parent._set_signature_columns_if_needed()
        trainer: Any = self
        if "index" not in trainer._signature_columns:
            trainer._signature_columns = [*trainer._signature_columns, "index"]


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

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            part = folder / f"{FILE}.part"
            torch.save(self.trainer.constrained.state_dict(), part)
            os.replace(part, folder / FILE)
