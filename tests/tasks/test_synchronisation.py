"""A training step reads from the device once, and waits for it nowhere else.

Counted on the CPU (tests/synchronisation.py), and where there is a GPU, with an error at every
other wait.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Pointwise, Training
from pl_pointwise.tasks import (
    ConversationDataModule,
    ConversationModule,
    RerankerDataModule,
    RerankerModule,
    SafetyDataModule,
    SafetyModule,
    When2CallDataModule,
    When2CallModule,
)
from pl_pointwise.training import stepper
from tests.synchronisation import step_waits
from tests.tasks.conftest import (
    make_data,
    make_module,
    quiet_trainer,
    write_rows,
    written_files,
)
from tests.tasks.reranker.conftest import ms_marco_rows, save_tiny_cross_encoder
from tests.tasks.safety.conftest import benign_rows, unsafe_rows
from tests.tasks.when2call.conftest import preference_rows

ONE_COPY = [
    "pl_pointwise/lagrangian/terms.py: cpu: "
    "flat = torch.cat([rows.flatten(), gradient_norm.to(rows).reshape(1)]).cpu()"
]

# The cache finds a sample by its tokens, which it reads before anything is computed.
KEYS = [
    "tasks/language_model/likelihood/scoring.py: cpu: prompts = wanted.prompt_ids.cpu()",
    "tasks/language_model/likelihood/scoring.py: cpu: responses = wanted.response_ids.cpu()",
]

POINTWISE = Pointwise(alpha=1.0, dual_lr=0.1)
SMALL: dict[str, Any] = {"val_fraction": 0.0, "batch_size": 3}


def reranker(root: Path, folder: Path) -> tuple[Any, Any]:
    model = save_tiny_cross_encoder(root / "model")
    file = str(write_rows(root / "records.jsonl", ms_marco_rows(9)))
    module = RerankerModule(str(model), formulation=POINTWISE, max_length=64)
    return module, RerankerDataModule(
        source="files", train_file=file, negatives=3, **SMALL
    )


def when2call(root: Path, folder: Path, **options: Any) -> tuple[Any, Any]:
    files = written_files(root, {"train_file": preference_rows(9)})
    options = {"formulation": POINTWISE} | options
    module = make_module(When2CallModule, folder, Training(), False, **options)
    return module, make_data(When2CallDataModule, folder, files, **SMALL)


def simpo(root: Path, folder: Path) -> tuple[Any, Any]:
    return when2call(root, folder, formulation=None, objective="simpo")


def average(root: Path, folder: Path) -> tuple[Any, Any]:
    """A statistic of the batch, whose slope has to be known before the backward pass."""
    return when2call(root, folder, formulation=Average(alpha=0.8, dual_lr=0.1))


def safety(root: Path, folder: Path) -> tuple[Any, Any]:
    files = written_files(
        root, {"benign_file": benign_rows(8), "unsafe_file": unsafe_rows(6)}
    )
    module = make_module(SafetyModule, folder, Training(), False, formulation=POINTWISE)
    return module, make_data(
        SafetyDataModule, folder, files, unsafe_schema="labelled", **SMALL
    )


def conversation(root: Path, folder: Path) -> tuple[Any, Any]:
    roles = ["prefer", "avoid", "reference", "refuse"]
    rows: list[dict[str, Any]] = [{"prompt": f"What is {i}?"} for i in range(12)]
    for i, row in enumerate(rows):
        said = [(f"It is {i}{'.' * j}", roles[(i + j) % 4]) for j in range(2)]
        row["responses"] = [{"content": text, "role": role} for text, role in said]
    files = written_files(root, {"train_file": rows})
    module = make_module(
        ConversationModule, folder, Training(), False, formulation=POINTWISE
    )
    return module, make_data(ConversationDataModule, folder, files, **SMALL)


TASKS: list[Callable[[Path, Path], tuple[Any, Any]]] = [
    reranker, when2call, simpo, average, safety, conversation,
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_a_step_waits_for_the_device_once(
    task: Any, tmp_path: Path, language_model_folder: Path
) -> None:
    """The second step: in the first one, scoring methods and data are checked."""
    module, data = task(tmp_path, language_model_folder)
    trainer = quiet_trainer(tmp_path, max_epochs=1, max_steps=3)
    found = step_waits(module, lambda: trainer.fit(module, data))
    assert found == ONE_COPY, "\n".join(found)


def test_with_a_reference_cache_the_tokens_are_read_besides(
    tmp_path: Path, language_model_folder: Path
) -> None:
    module, data = when2call(tmp_path, language_model_folder, reference_cache="memory")
    trainer = quiet_trainer(tmp_path, max_epochs=2, max_steps=12)
    # the second epoch
    found = step_waits(module, lambda: trainer.fit(module, data), step=7)
    assert found == KEYS + ONE_COPY, "\n".join(found)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda values, device: values.sum().item(),
        lambda values, device: values[values > 0],
        lambda values, device: torch.ones(3).to(device),
        lambda values, device: torch.tensor([1.0], device=device),
    ],
)
def test_a_wait_in_a_step_would_be_noticed(waiting: Any, tmp_path: Path) -> None:
    module, data = reranker(tmp_path, tmp_path)
    plain = module.objective

    def objective(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        waiting(outputs, outputs.device)
        return plain(outputs, batch)

    module.objective = objective
    trainer = quiet_trainer(tmp_path, max_epochs=1, max_steps=3)
    assert len(step_waits(module, lambda: trainer.fit(module, data))) > len(ONE_COPY)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", TASKS[1:], ids=lambda task: task.__name__)  # See MASK.
def test_a_step_on_a_gpu_waits_nowhere_but_in_the_one_copy(
    task: Any,
    tmp_path: Path,
    language_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, data = task(tmp_path, language_model_folder)
    steps, plain_step, unpack = [], module.training_step, stepper.unpack

    def training_step(batch: Any, batch_idx: int) -> Any:
        steps.append(batch_idx)
        torch.cuda.set_sync_debug_mode("error" if len(steps) == 2 else "default")
        try:
            return plain_step(batch, batch_idx)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def with_the_copy(*arguments: Any) -> Any:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return unpack(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    module.training_step = training_step
    monkeypatch.setattr(stepper, "unpack", with_the_copy)
    options = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed"}
    quiet_trainer(tmp_path, max_epochs=1, max_steps=3, **options).fit(module, data)
    assert len(steps) == 3
