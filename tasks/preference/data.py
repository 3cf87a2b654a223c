"""Preference data: a prompt, an answer that was chosen and one or several that were rejected.

The chosen answer is of role "prefer", the others of role "avoid".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.data import Parse
from pl_pointwise.tasks.common.records import Row
from pl_pointwise.tasks.language_model.pairs import PairsDataModule
from pl_pointwise.tasks.language_model.text.pairs import of_no_kind
from pl_pointwise.tasks.language_model.text.records import (
    Record,
    conversation,
    make_record,
    read_preference,
    read_when2call,
    reads_whole,
)


class PreferenceDataModule(PairsDataModule):
    """Pairs of a chosen and a rejected answer, tokenised once.

    A record has ``chosen`` and ``rejected``, texts, messages, or whole conversations that differ in
    the last turn; the prompt stands in them, or in "prompt", "messages", "question", "instruction"
    or "input", with "system" and "tools" where there are any. When2Call's own rows are read too.

    Batches are those of language_model/roles.py, response 0 the chosen one. ``test`` runs "test",
    held-out pairs, and "train", one full pass over the training data.

    Args:
        model_name: the model whose tokenizer and chat template to use; None takes the module's.
        source: "files" or "hub".
        train_file: JSON lines, JSON, CSV, TSV, Parquet or Arrow, by their endings; one or several.
        val_file: those held out; without one a part of the training prompts.
        test_file: those that certify; without one preparation.test_fraction, else "val".
        predict_file: prompts to answer in `predict`; with any source.
        hub_path: the data set on the hub, or a folder of the same layout.
        hub_config: its configuration.
        hub_split: its split, of which a part is held out.
        group_rejected: make one sample of the records of one prompt and chosen answer, with several
            rejected ones; otherwise each record is a sample with one.
        options: ``preparation``, of skipping and holding out, and those of `PointwiseDataModule`;
            ``seed`` also of what is held out.

    Raises:
        DataError: options that contradict each other.

    .. versionadded:: 0.3.0
    """

    sources = ("files", "hub")

    def __init__(
        self,
        model_name: str | None = None,
        *,
        source: Literal["files", "hub"] = "files",
        train_file: str | list[str] | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        hub_path: str | None = None,
        hub_config: str | None = None,
        hub_split: str = "train",
        group_rejected: bool = False,
        **options: Any,
    ) -> None:
        files = {"train": train_file, "val": val_file, "test": test_file}
        super().__init__(
            model_name, source, files | {"predict": predict_file}, **options
        )
        # A path that nobody reads, or a hub without a name.
        if (source == "hub") != (hub_path is not None):
            raise DataError(
                f"source={source}, hub_path={hub_path}: set both, or neither."
            )
        self.hub = hub_path, hub_config, hub_split
        self.group_rejected = group_rejected

    def on_hub(self, name: str) -> Any:
        """One split, to train on."""
        return self.hub if name == "train" else None

    def reader(self, name: str) -> Parse:
        """Of pairs; of what is predicted for the prompt alone."""
        return read_prompt if name == "predict" else read_pair


@reads_whole
def read_pair(row: Row, where: str) -> Record:
    """The record of a row of either schema: the chosen answer, then the rejected one."""
    when2call = "chosen_response" in row and "rejected_response" in row
    read = read_when2call if when2call else read_preference
    return of_no_kind(read(row, where))


@reads_whole
def read_prompt(row: Row, where: str) -> Record:
    """The prompt of a row, with or without answers."""
    # A file of pairs to answer: the prompt may stand in the answers' conversations.
    if row.get("chosen") is not None:
        return replace(read_pair(row, where), responses=())
    row.read |= {"chosen", "rejected", "chosen_response", "rejected_response"}
    return replace(make_record(row, conversation(row, where), [], where), given_kind="")
