"""Two tasks by Lightning, a loop, and the Trainer of transformers: on the same batches the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from transformers import Trainer, TrainingArguments

from pl_pointwise import (
    Optimization,
    Pointwise,
    PointwiseLoss,
    PointwiseModule,
    Training,
)
from pl_pointwise.tasks import ConversationModule
from pl_pointwise.tasks.digits import DigitsDataModule, DigitsModule
from pl_pointwise.trainer import PointwiseTrainerMixin
from tests.tasks.conftest import make_module, quiet_trainer
from tests.tasks.conversation.conftest import (
    ADAPTERS,
    conversation_rows,
    data_of,
    written,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RATE = 1e-2
TRAINING = Training(
    Optimization(learning_rate=RATE, weight_decay=0.0, schedule="constant")
)


def digits(*_: Any) -> tuple[PointwiseModule, Any]:
    return DigitsModule(Pointwise(), training=TRAINING), DigitsDataModule(
        batch_size=256
    )


def conversation(model: Path, folder: Path) -> tuple[PointwiseModule, Any]:
    data = data_of(written(folder, conversation_rows(3)), model)
    options = {"lora": ADAPTERS, "formulation": Pointwise()}
    return make_module(ConversationModule, model, TRAINING, True, **options), data


class Batches(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(deepcopy(batch))


class Constrained(PointwiseTrainerMixin, Trainer):
    """The module's terms of the given batches."""

    batches: list[Any]

    def terms(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
        outputs = model(inputs)
        values = (
            model.objective(outputs, inputs),
            model.constraint_values(outputs, inputs),
        )
        return *values, model.membership(inputs)

    def get_train_dataloader(self) -> Any:
        return self.batches


@contextmanager
def in_float64() -> Iterator[None]:
    """New tensors are of it too, as under Lightning's precision."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def trained(module: PointwiseModule) -> list[torch.Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("task", [digits, conversation])
def test_every_door_takes_the_same_steps_to_the_bit(
    task: Callable[..., Any], tmp_path: Path, language_model_folder: Path
) -> None:
    module, data = task(language_model_folder, tmp_path)
    by_loop, by_trainer = (
        deepcopy(module).double().train(),
        deepcopy(module).double().train(),
    )
    options = {"max_epochs": 2, "precision": "64-true", "num_sanity_val_steps": 0}
    batches = Batches()
    quiet_trainer(tmp_path, callbacks=[batches], limit_val_batches=0, **options).fit(
        module, data
    )
    samples = len(data.datasets["train"])

    with in_float64():
        loss = PointwiseLoss(by_loop.constraints, Pointwise(), samples=samples)
        optimizer = torch.optim.AdamW(
            trained(by_loop), lr=RATE, weight_decay=0.0, fused=True
        )
        for batch in batches.seen:
            outputs = by_loop(batch)
            terms = (
                by_loop.objective(outputs, batch),
                by_loop.constraint_values(outputs, batch),
            )
            share = loss(*terms, batch["index"], masks=by_loop.membership(batch))
            optimizer.zero_grad()
            share.backward()
            optimizer.step()
            loss.step()

        arguments = TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            optim="adamw_torch_fused",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            num_train_epochs=1,
            max_grad_norm=0.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Constrained(
            model=by_trainer,
            args=arguments,
            train_dataset=[{}] * samples,
            data_collator=lambda rows: rows,
            constraints=by_trainer.constraints,
            formulation=Pointwise(),
        )
        trainer.batches = batches.seen
        trainer.train()

    assert len(batches.seen) == trainer.state.global_step > 2
    assert any(table.any() for table in module.multipliers.values())
    for door, multipliers in (
        (by_loop, loss.multipliers),
        (by_trainer, trainer.constrained.multipliers),
    ):
        torch.testing.assert_close(
            dict(multipliers), dict(module.multipliers), rtol=0, atol=0
        )
        for weight, expected in zip(trained(door), trained(module), strict=True):
            assert weight.dtype == torch.float64
            assert torch.equal(weight, expected)
