"""Answers to chosen prompts, written while the model is trained: what it says, not how likely."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from pl_pointwise.errors import DataError, one_of
from pl_pointwise.task import evaluation_mode
from pl_pointwise.training.random_state import random_state, restore_random_state

from .outputs import RunFolder

FILE = "answers.jsonl"
TOGETHER = 8  # Prompts that are answered in one batch.


class AnswerSamples(Callback):
    """Lets a module with ``answers_to(prompts)``, such as a language task's, answer a few prompts.

    Before the first step and after epochs. ``answer-samples/answers.jsonl`` below the run's folder
    has a line an answer; a resumed run goes on in it, so the steps after its checkpoint are there
    twice. Every rank answers, rank 0 writes, and the run's random numbers stay.

    Args:
        prompts: texts, lists of messages {role, content}, or {"messages", "tools"}.
        indexes: positions in ``data``.
        per_category: so many of each category of ``data``, the first ones.
        data: a data set of the data module's, "train" or "val". Without a "val",
            ``per_category`` takes "train".
        every_n_epochs: answer at the end of so many epochs; None does not.
    """

    def __init__(
        self,
        prompts: list[str | list[dict[str, Any]] | dict[str, Any]] | None = None,
        indexes: list[int] | None = None,
        per_category: int = 0,
        data: str = "val",
        every_n_epochs: int | None = 1,
    ) -> None:
        if not prompts and not indexes and per_category < 1:
            raise ValueError("AnswerSamples: which prompts? Give prompts, indexes or per_category.")
        self.prompts = [_conversation(prompt) for prompt in prompts or []]
        self.indexes, self.per_category, self.data = list(indexes or []), per_category, data
        self.every_n_epochs, self.folder = every_n_epochs, RunFolder("answer-samples")

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._asked = [*self.prompts, *self._of_data(getattr(trainer, "datamodule", None))]
        self.folder.claim(trainer)
        rank_zero_info(f"Answers are written to {self.folder.path / FILE}")
        if trainer.global_step == 0:
            self._answer(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._answer(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"folder": self.folder.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.folder.restored = state_dict["folder"]

    def _of_data(self, datamodule: Any) -> list[dict[str, Any]]:
        """The conversations of the data set that were asked for."""
        if not self.indexes and not self.per_category:
            return []
        name, there = self.data, list(datamodule.datasets)
        if name == "val" and name not in there and not self.indexes:
            name = "train"
        one_of("data", name, there)
        dataset = datamodule.datasets[name]
        categories = getattr(dataset, "categories", None) or [""] * len(dataset)
        seen, chosen = Counter[str](), list(self.indexes)
        if beyond := [index for index in chosen if not 0 <= index < len(dataset)]:
            raise DataError(
                f"AnswerSamples: there is no index {beyond[0]} in {name}, which has "
                f"{len(dataset):,} samples, from 0. Give others in indexes."
            )
        for index, category in enumerate(categories):
            seen[category] += 1
            if seen[category] <= self.per_category and index not in chosen:
                chosen.append(index)
        found = [(index, dataset.record(index)) for index in chosen]
        return [
            {"messages": r.messages, "tools": r.tools, "index": i, "category": categories[i]}
            for i, r in found
        ]

    def _answer(self, trainer: Trainer, module: Any) -> None:
        context, state = trainer.precision_plugin.forward_context(), random_state(module.device)
        rows = []
        with evaluation_mode(module), torch.no_grad(), context:
            for start in range(0, len(self._asked), TOGETHER):
                asked = self._asked[start : start + TOGETHER]
                for each, found in zip(asked, module.answers_to(asked), strict=True):
                    about = {key: each[key] for key in ("index", "category") if key in each}
                    row = {"step": trainer.global_step, "epoch": trainer.current_epoch}
                    rows.append({**row, "prompt": shown(each["messages"]), **about, **found})
        restore_random_state(state, module.device)
        if trainer.is_global_zero:
            with (self.folder.path / FILE).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _conversation(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return dict(prompt) if isinstance(prompt, Mapping) else {"messages": prompt}


def shown(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as text; of one user's turn its text."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{each['role']}: {each.get('content') or ''}" for each in messages)
