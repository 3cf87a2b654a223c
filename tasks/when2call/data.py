"""When2Call data: where records come from, which prompts are held out, and the data module."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pl_pointwise.errors import DataError, one_of
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.data import Needs, Parse
from pl_pointwise.tasks.language_model.data import (
    DEFAULT_PREPARATION,
    Preparation,
    ResponseDataModule,
)
from pl_pointwise.tasks.language_model.likelihood.batch import collate_columns
from pl_pointwise.tasks.language_model.text.records import Record

from .records import (
    ROLES,
    grouped,
    parse_choice,
    parse_pair,
    parse_preference,
    parse_question,
)


class When2CallDataModule(ResponseDataModule):
    """Preference records for training, multiple-choice records for the table, tokenised once.

    Raw records are those of ``nvidia/When2Call``; tools and calls may be JSON or objects.
    For the preference split {"tools", "messages", "chosen_response",
    "rejected_response", "category", "rejected_category"}; of the multiple-choice split
    {"question", "tools", "answers": {behaviour: text}, "correct_answer"}.

    Batches are those of language_model/roles.py, response 0 the chosen or right one, and have
    ``characters`` (B, R) long, of each response without what ends the turn.

    ``test`` runs three data sets: "test", held-out preference records; "train", one full pass
    over the training data; "mcq", multiple choice. It leaves out what there is none of.

    Args:
        model_name: the model whose tokenizer and chat template to use; None takes that of the
            module it is used with.
        source: "hub" or "files".
        hub_path: the data set on the hub, or a folder of the same layout.
        schema: of the preference records, "when2call" or "pairs": {input, chosen, rejected} and
            optionally system, all texts; then without multiple choice on the hub.
        train_file: preference records: JSON lines, JSON, CSV, TSV, Parquet or Arrow, by its ending.
        val_file: those held out; without one a part of the training prompts.
        test_file: those that certify; without one preparation.test_fraction of the training
            prompts, without either "val".
        mcq_file: multiple-choice records.
        predict_file: records of {question, tools} to answer; with any source.
        group_rejected: make one sample of the records of one prompt and chosen response, with
            several rejected ones; otherwise each record is a sample with one.
        preparation: how records become samples: skipping, holding out.
        options: of `PointwiseDataModule`; ``seed`` also of what is held out.
    """

    needs: ClassVar[Needs] = {**ResponseDataModule.needs, "test": ("test", "train", "mcq")}
    roles = ROLES

    def __init__(
        self,
        model_name: str | None = None,
        *,
        source: Literal["hub", "files"] = "hub",
        hub_path: str = "nvidia/When2Call",
        schema: Literal["when2call", "pairs"] = "when2call",
        train_file: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        mcq_file: str | None = None,
        predict_file: str | None = None,
        group_rejected: bool = False,
        preparation: Preparation = DEFAULT_PREPARATION,
        **options: Any,
    ) -> None:
        files = {"train": train_file, "val": val_file, "test": test_file, "mcq": mcq_file}
        files["predict"] = predict_file
        super().__init__(model_name, source, files, preparation, **options)
        one_of("schema", schema, ("when2call", "pairs"), DataError)
        self.hub_path, self.schema, self.group_rejected = hub_path, schema, group_rejected

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """Besides, the characters of each response."""
        characters = collate_columns([row["characters"] for row in rows], rows[0]["columns"], 0)
        return super().collate(rows) | {"characters": characters}

    def on_hub(self, name: str) -> tuple[str, str | None, str] | None:
        """A configuration of ``nvidia/When2Call`` for each; of pairs the one split."""
        own = {"train": "train_pref", "mcq": "test"}
        configs = {"train": None} if self.schema == "pairs" else own
        return (self.hub_path, configs[name], name) if name in configs else None

    def reader(self, name: str) -> Parse:
        """By data set; of preference records by ``schema``."""
        parse = parse_preference if self.schema == "when2call" else parse_pair
        return {"predict": parse_question, "mcq": parse_choice}.get(name, parse)

    def read_splits(self) -> dict[str, list[Record]]:
        """The splits, of several rejected answers one sample where asked for."""
        splits = super().read_splits()
        return {n: grouped(found) for n, found in splits.items()} if self.group_rejected else splits
