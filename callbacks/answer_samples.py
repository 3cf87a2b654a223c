"""Answers to chosen prompts, written while the model is trained: what it says, not how likely."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from pl_pointwise.errors import one_of
from pl_pointwise.files import free_path, run_root

FILE = "answers.jsonl"
TOGETHER = 8  # Prompts that are answered in one batch.


class AnswerSamples(Callback):
    """Lets a module with ``answers_to(prompts)``, such as a language task's, answer a few prompts.

    Before the first step, on the way, and always after the last one: also of a run that a limit, a
    callback or SIGTERM stops. No step is answered twice. ``answer-samples/answers.jsonl`` below the
    run's folder has a line an answer; each fit, a resumed one too, has a folder of its own. Every
    rank answers, rank 0 writes, and the run's random numbers stay.

    Args:
        prompts: texts, lists of messages {role, content}, or {"messages", "tools"}.
        per_category: so many of each category of ``data``, the first ones.
        data: a data set of the data module's, "train" or "val". Without a "val",
            ``per_category`` takes "train".
        every_n_epochs: answer at the end of so many epochs too; None does not.
        every_n_steps: answer after so many steps too, for epochs that are long.

    Raises:
        ValueError: no prompts, or a number below 1.

    >>> from lightning.pytorch import Trainer
    >>> from pl_pointwise.callbacks import AnswerSamples
    >>> callback = AnswerSamples(["When do you open?"], every_n_epochs=5)
    >>> trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    """

    def __init__(
        self,
        prompts: list[str | list[dict[str, Any]] | dict[str, Any]] | None = None,
        per_category: int = 0,
        data: str = "val",
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
    ) -> None:
        if not prompts and per_category < 1:
            raise ValueError(
                "AnswerSamples: which prompts? Give prompts or per_category."
            )
        for name, count in {"epochs": every_n_epochs, "steps": every_n_steps}.items():
            if count is not None and count < 1:
                raise ValueError(
                    f"every_n_{name}={count}: give a number from 1, or null."
                )
        self.prompts = [_conversation(prompt) for prompt in prompts or []]
        self.per_category = per_category
        self.data = data
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._asked = [
            *self.prompts,
            *self._of_data(getattr(trainer, "datamodule", None)),
        ]
        # Asks all ranks.
        self._path = free_path(run_root(trainer), "answer-samples") / FILE
        rank_zero_info(f"Answers are written to {self._path}")
        self._epoch = trainer.current_epoch
        self._answered: int | None = None  # The last step whose model answered.
        # The answers of the model as it came, which later ones are read beside.
        if trainer.global_step == 0:
            self._answer(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._epoch = trainer.current_epoch

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._answer(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.every_n_epochs and (self._epoch + 1) % self.every_n_epochs == 0:
            self._answer(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._answer(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: Any, exception: BaseException
    ) -> None:
        """After SIGTERM, which ends a run between two steps, and is saved before."""
        if isinstance(exception, SIGTERMException) and trainer.training:
            self._answer(trainer, pl_module)

    def _of_data(self, datamodule: Any) -> list[dict[str, Any]]:
        """The conversations of the data set that were asked for."""
        # Prompts of one's own alone.
        if not self.per_category:
            return []
        name = self.data
        # Without validation data the training prompts show as much.
        if name == "val" and name not in datamodule.datasets:
            name = "train"
        one_of("data", name, list(datamodule.datasets))
        dataset = datamodule.datasets[name]
        categories = getattr(dataset, "categories", None) or [""] * len(dataset)
        seen = Counter[str]()
        chosen = list[dict[str, Any]]()
        for index, category in enumerate(categories):
            seen[category] += 1
            if seen[category] <= self.per_category:
                record = dataset.record(index)
                chosen.append(
                    {
                        "messages": record.messages,
                        "tools": record.tools,
                        "index": index,
                        "category": category,
                    }
                )
        return chosen

    def _answer(self, trainer: Trainer, module: Any) -> None:
        # Of the end of an epoch, or a step left out.
        if trainer.global_step == self._answered:
            return
        self._answered = trainer.global_step
        rows = []
        context = trainer.precision_plugin.forward_context()
        with evaluation_mode(module), isolate_rng(), torch.no_grad(), context:
            for start in range(0, len(self._asked), TOGETHER):
                prompts = self._asked[start : start + TOGETHER]
                for prompt, answer in zip(
                    prompts, module.answers_to(prompts), strict=True
                ):
                    row = {
                        "step": trainer.global_step,
                        "epoch": self._epoch,
                        "prompt": shown(prompt["messages"]),
                    }
                    for key in ("index", "category"):
                        if key in prompt:  # Of the data, not of one's own prompts.
                            row[key] = prompt[key]
                    rows.append({**row, **answer})
        # All ranks answer alike; one writes.
        if trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Every part in evaluation mode, also of a task whose ``answers_to`` does not see to it."""
    in_training = [part for part in module.modules() if part.training]
    try:
        for part in in_training:
            part.training = False
        yield
    finally:
        for part in in_training:
            part.training = True


def _conversation(prompt: Any) -> dict[str, Any]:
    """A prompt with its messages, in whichever form it was given."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return dict(prompt) if isinstance(prompt, Mapping) else {"messages": prompt}


def shown(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as text; of one user's turn its text."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    lines = []
    for message in messages:
        lines.append(f"{message['role']}: {message.get('content') or ''}")
    return "\n".join(lines)
