"""Re-ranking data: where records come from, which are held out and kept, and the data module."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.data import (
    Parse,
    RecordsDataModule,
    check_fractions,
    side_of_held_out,
    split_by_group,
)
from pl_pointwise.tasks.common.models import limits_of_model
from pl_pointwise.tasks.common.records import (
    digest,
    hub_split,
    largest,
    records_of,
    refused,
    report_skipped,
    rows_of,
    without_fields,
)

from .collection import Collection
from .loading import load_tokenizer
from .pairs import collected
from .records import (
    Record,
    RerankerDataset,
    check_together,
    parse_candidates,
    parse_labelled,
    rows_of_one_answer,
    token_lengths,
)
from .template import Template

DOCSTRINGS = Path(__file__).parent / "docstrings" / "docstrings.jsonl"


class RerankerDataModule(RecordsDataModule):
    """Queries with one positive and up to ``negatives`` negative passages each, tokenised once.

    The schemas of raw records are those of docs/reranker.md. A batch of B records, with
    C = 1 + negatives, candidate 0 the positive::

        index            (B,)       long     the sample's position in the data set
        input_ids        (B, C, T)  long     padded with the tokenizer's pad token to the longest
        token_type_ids   (B, C, T)  long     only if the tokenizer makes them
        lengths          (B, C)     long     tokens of each pair; 0 where there is no candidate
        candidates       (B, C)     bool     False where a record has fewer than C candidates
        passage_lengths  (B, C)     float32  L of the objective: tokens of the passage by itself,
                                             no special tokens, before any cut

    For prediction (``predict_file``: {query, passages}, the passages a list of texts or
    {passage_text: such a list}) the candidates keep their order, C is the most of a record in the
    batch, and a list "query_id" is added.

    Test data are ``test_file``, else what ``test_fraction`` holds out, else the validation data. A
    set with more records than its ``max_queries`` or ``val_queries`` keeps those whose negatives'
    lengths vary most, as the paper does. Where there are test data of their own, "val" and "test"
    are random draws instead: a certificate speaks of new queries, and queries chosen by length are
    not like them.

    Args:
        model_name, max_length, template, instruction: the module's; give them to use the data
            without one.
        source: "embedded" are docstrings that ship with this package, held out by module; "hub" is
            ``hub_path``, its splits "train" and "validation"; of the training queries of "files" a
            part is held out, of each query_type the same, by query text.
        hub_path: the dataset on the hub, or a folder of the same layout.
        hub_config: its configuration.
        train_file: JSON lines, JSON, CSV, TSV, Parquet or Arrow, by its ending; with
            ``corpus_file`` judgements of relevance, BEIR's or TREC's.
        val_file: as train_file.
        test_file: as train_file.
        predict_file: queries to predict for; of use with any source.
        corpus_file: the passages of a collection, by id (collection.py).
        queries_file: its queries, by id.
        run_file: candidates of each query, as a first stage found them; negatives are those without
            a judgement above 0.
        relevant_from: the least label, score or judgement of an answer, where these are grades.
            None takes 1 of the labels 0 and 1, and of judgements all above 0.
        invalid: what to do with a record that cannot be used: "error" or "skip". None is "skip" for
            the hub, where queries with no or several marked passages are normal, and "error"
            otherwise. Records for prediction are never skipped.
        negatives: K per query, a random choice if there are more.
        min_negatives: the fewest a record may have; None is ``negatives``.
        max_queries: the most training queries; None is all.
        val_queries: the most queries in validation data, and in test data; None is all.
        val_fraction: the part of the training queries to hold out where the source has no
            validation data.
        test_fraction: the same as test data, to certify. The hub's "validation" is divided in the
            proportion of both fractions.
        options: of `PointwiseDataModule`; ``seed`` also of what is held out and which negatives.
    """

    sources = ("embedded", "hub", "files")

    def __init__(
        self,
        model_name: str | None = None,
        *,
        max_length: int | None = None,
        template: str | None = None,
        instruction: str | None = None,
        source: Literal["embedded", "hub", "files"] = "embedded",
        hub_path: str = "microsoft/ms_marco",
        hub_config: str | None = "v2.1",
        train_file: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        corpus_file: str | None = None,
        queries_file: str | None = None,
        run_file: str | None = None,
        relevant_from: float | None = None,
        invalid: Literal["error", "skip"] | None = None,
        negatives: int = 9,
        min_negatives: int | None = None,
        max_queries: int | None = 50_000,
        val_queries: int | None = 5_000,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        **options: Any,
    ) -> None:
        self.limits = {"train": max_queries, "val": val_queries, "test": val_queries}
        files = {
            "train": train_file,
            "val": val_file,
            "test": test_file,
            "predict": predict_file,
        }
        check_fractions(val_fraction, test_fraction)
        shares = {"val": val_fraction, "test": test_fraction}
        super().__init__(source, files, shares, invalid, **options)
        # Read here, so that a wrong one is refused before a model is loaded.
        if template is not None:
            Template.parse(template)
        self.collection = _collection(
            corpus_file, queries_file, run_file, relevant_from
        )
        self._format_options = {
            "model_name": model_name,
            "max_length": max_length,
            "template": template,
            "instruction": instruction,
        }
        self.hub_path = hub_path
        self.hub_config = hub_config
        self.negatives = negatives
        self.relevant_from = relevant_from
        self._counts: dict[str, Any] = {
            "negatives": negatives,
            "least": _least_negatives(negatives, min_negatives),
            "seed": self.seed,
            "relevant_from": relevant_from,
        }

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """The batch of the class docstring, of rows of a :class:`RerankerDataset` with an index."""
        predicting = "query_id" in rows[0]
        # In training C is the same in every batch, as λ has a column for each negative.
        most = (
            max(len(row["input_ids"]) for row in rows)
            if predicting
            else 1 + self.negatives
        )

        def of_candidates(name: str, absent: Any) -> list[Any]:
            """B · C entries, ``absent`` where a record has no candidate."""
            entries: list[Any] = []
            for row in rows:
                entries.extend(row[name])  # Lists, or an array.
                entries.extend([absent] * (most - len(row[name])))
            return entries

        nothing = np.zeros(0, np.int32)
        count = len(rows)
        alone = torch.tensor(of_candidates("passage_lengths", 0.0))
        lengths = torch.tensor([*map(len, of_candidates("input_ids", nothing))])
        lengths = lengths.view(count, most)
        batch: Batch = {
            "index": torch.tensor([row["index"] for row in rows]),
            "lengths": lengths,
            "candidates": lengths > 0,
            "passage_lengths": alone.view(count, most),
        }
        fillers = {"input_ids": self._tokenizer.pad_token_id, "token_type_ids": 0}
        for name, filler in fillers.items():
            if name in rows[0]:
                values = [torch.from_numpy(ids) for ids in of_candidates(name, nothing)]
                padded = pad_sequence(values, batch_first=True, padding_value=filler)
                batch[name] = padded.long().view(count, most, -1)
        if predicting:
            batch["query_id"] = [row["query_id"] for row in rows]
        return batch

    def describe(self, index: int, dataset: str = "train") -> dict[str, str]:
        """The texts of query ``index``; column j of the constraint is negative j + 1."""
        samples = self.datasets[dataset]
        assert isinstance(samples, RerankerDataset)
        record = samples.records[index]
        fields = {"record": record.where, "query": record.query}
        for column, passage in enumerate(record.passages):
            fields[f"negative {column}" if column else "positive"] = passage
        return fields

    # For the base ---------------------------------------------------------------------------------

    def take_model(self, known: Any) -> dict[str, Any]:
        """The input format, the module's."""
        agreed = {}
        for option, value in self._format_options.items():
            agreed[option] = self.shared_option(option, value)
        # What cross-encoders are trained with, where neither module nor data say.
        if agreed["max_length"] is None:
            agreed["max_length"] = 512
        name, longest, template, instruction = agreed.values()
        if name is None:
            raise DataError(
                "model_name: the data need a tokenizer. Name one, or use them with RerankerModule."
            )
        if agreed != known:
            tokenizer = load_tokenizer(name)
            # Cuts need the places of tokens in the text, which fast tokenizers alone give.
            if not tokenizer.is_fast or tokenizer.pad_token_id is None:
                raise DataError(
                    f"{name}: take an encoder with a fast tokenizer that has a pad token."
                )
            # At least one token of the query and one of the passage have to fit.
            least = tokenizer.num_special_tokens_to_add(pair=template is None) + 2
            if not least <= longest <= tokenizer.model_max_length:
                raise DataError(
                    f"max_length={longest}: {name} takes from {least} to "
                    f"{tokenizer.model_max_length:,} tokens."
                )
            self._tokenizer = tokenizer
            self._format = {
                "max_length": longest,
                "template": template,
                "instruction": instruction,
            }
        return agreed

    def encoded(self, name: str, records: Sequence[Record]) -> RerankerDataset:
        """The pairs of each record."""
        _, rows = limits_of_model(self.trainer)
        skip = self.skips(name)
        return RerankerDataset(
            records,
            self._tokenizer,
            **self._format,
            rows=rows,
            name=name,
            skip_invalid=skip,
        )

    def reader(self, name: str) -> Parse:
        """With the passage that is marked first; to predict for in the order given."""
        return (
            parse_candidates
            if name == "predict"
            else partial(parse_labelled, **self._counts)
        )

    def task_records(self, name: str) -> list[Record]:
        """Of the hub's two splits only what is asked for, as one of them is long."""
        if self.source == "hub" and name in SPLITS and name not in self._records:
            self._records |= self._from_hub(
                "train" if name == "train" else "validation"
            )
        return super().task_records(name)

    def read(self, name: str) -> list[Record]:
        """The records of a data set's files; of a row with several answers one for each."""
        records = list[Record]()
        parse = self.reader(name)
        for path in self.files.get(name, ()):
            # What is predicted for has no answers by which a row could be divided.
            rows = rows_of(path) if name == "predict" else self._rows_of_answers(path)
            records += records_of(rows, path, parse, self.skips(name), self.ignore)
        return records

    def _rows_of_answers(self, path: str) -> Iterator[tuple[str, Any]]:
        """The rows of a file of training or held-out data, one for each answer of a query."""
        if self.collection is not None:
            rows = self.collection.rows(path)
        else:
            rows = collected(
                rows_of(path),
                path,
                negatives=self.negatives,
                relevant_from=self.relevant_from,
                skip_invalid=self.skip_invalid,
            )
        for where, raw in rows:
            for row in rows_of_one_answer(raw, self.relevant_from):
                yield where, row

    def read_splits(self) -> dict[str, list[Record]]:
        """The records of files, or of the embedded corpus, that each split keeps."""
        splits = super().read_splits() if self.source == "files" else self._embedded()
        for split, records in splits.items():
            splits[split] = check_together(records, self.skip_invalid)
        for split, records in splits.items():
            # Not a list: where nothing is left out, no length is measured.
            variances = (_variance(self._tokenizer, record) for record in records)
            splits[split] = self._kept(split, records, variances)
        return splits

    def _embedded(self) -> dict[str, list[Record]]:
        records = [
            parse_labelled(row, f"embedded corpus, {row['query_id']}", **self._counts)
            for row in docstring_records(self.negatives, self.seed)
        ]
        if not records:
            raise DataError(
                "The embedded corpus has no module with so many negatives. Lower them."
            )
        # By whole modules: docstrings of one module are each other's negatives.
        modules = [record.category for record in records]
        splits = split_by_group(records, modules, self.shares, self.seed, "module")
        self.note_held_out(splits, "", self.shares)
        return splits

    def _kept(
        self, name: str, usable: list[Any], variances: Iterable[float]
    ) -> list[Any]:
        """Those queries that a split keeps; of each the variance of its negatives' lengths."""
        limit = self.limits[name]
        # Nothing to choose: the paper's rule picks among more queries than it can train on.
        if limit is None or len(usable) <= limit:
            return usable
        # With data to certify on, a choice by length would make them unlike new queries.
        if name != "train" and (self.shares["test"] or self.files["test"]):
            rule = "drawn at random"
            chosen = random.Random(digest(self.seed, name)).sample(
                range(len(usable)), limit
            )
            chosen.sort()
        else:
            rule = "those whose negatives' lengths vary most"
            chosen = largest([*variances], limit)
        rank_zero_info(f"{name}: kept {limit:,} of {len(usable):,} queries, {rule}.")
        if name == "train":
            count = len(usable) - limit
            why = f"data.max_queries is {limit:,}"
            self.note_left_out("limit", count, len(usable), "training queries", why)
        return [usable[position] for position in chosen]

    def _from_hub(self, split: str) -> dict[str, list[Record]]:
        """The records of "train", or of "val" and "test", which divide the hub's "validation"."""
        rows = hub_split(self.hub_path, self.hub_config, split)
        source = f"{self.hub_path}, {split}"

        def parse(row: Any, position: int) -> Record:
            row = without_fields(row, self.ignore)
            return parse_labelled(
                row, f"{source}, record {position + 1}", **self._counts
            )

        def measure(row: Any, position: int) -> dict[str, Any]:
            try:
                variance = _variance(self._tokenizer, parse(dict(row), position))
            except DataError as error:
                return {"problem": str(error), "variance": 0.0}
            return {"problem": "", "variance": variance}

        # The measurements of all rows are kept on disk, by what they depend on.
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()  # a state of its last use, as is padding
        backend.no_padding()
        key = digest(
            rows._fingerprint, source, backend.to_str(), [*self._counts.values(), "row"]
        )
        options: dict[str, Any] = {"with_indices": True, "new_fingerprint": key[:32]}
        measured = rows.map(measure, remove_columns=rows.column_names, **options)
        problems, variances = measured["problem"][:], measured["variance"][:]
        usable = [i for i, problem in enumerate(problems) if not problem]
        if wrong := [*filter(None, problems)]:
            refused(DataError(wrong[0]), self.skip_invalid)
            report_skipped(source, wrong, len(usable))
            if split == "train":
                self.note_left_out(
                    source, len(wrong), len(rows), f"records of {source}"
                )
        sides = ["train"] * len(usable)
        # The hub's one validation split serves to select and to certify: a query is on one side.
        if split != "train":
            records = [parse(rows[i], i) for i in usable]
            sides = side_of_held_out(records, self.shares, self.seed)
        splits = {}
        for name in ("train",) if split == "train" else ("val", "test"):
            of_split = [
                i for i, side in zip(usable, sides, strict=True) if side == name
            ]
            kept = self._kept(name, of_split, (variances[i] for i in of_split))
            splits[name] = check_together(
                [parse(rows[i], i) for i in kept], self.skip_invalid
            )
        return splits


def _least_negatives(negatives: int, least: int | None) -> int:
    """How many irrelevant passages a query has at least."""
    least = negatives if least is None else least
    if not 1 <= least <= negatives:
        raise DataError(
            f"negatives={negatives}, min_negatives={least}: need 1 ≤ min_negatives ≤ negatives."
        )
    return least


def _collection(
    corpus_file: str | None,
    queries_file: str | None,
    run_file: str | None,
    relevant_from: float | None,
) -> Collection | None:
    """The passages and queries that judgements name by id; None where records hold their texts."""
    if corpus_file is not None and queries_file is not None:
        return Collection(corpus_file, queries_file, run_file, relevant_from)
    # A run or queries alone name passages by id, and nobody has their texts.
    if corpus_file or queries_file or run_file:
        raise DataError(
            f"corpus_file={corpus_file}, queries_file={queries_file}: a collection needs both."
        )
    return None


def _variance(tokenizer: PreTrainedTokenizerBase, record: Record) -> float:
    """Variance of the lengths of a query's negatives in tokens; the positive is the first."""
    return float(np.var(token_lengths(tokenizer, record.passages[1:])))


def docstring_records(negatives: int, seed: int = 0) -> list[dict[str, Any]]:
    """The embedded corpus: a docstring of Python's standard library becomes one record:

        query      "Read and return a line from the stream."                  the summary
        positive   "If limit is specified, at most limit bytes will be read." the body
        negatives  "If the argument is omitted, None, or negative, data ..."  other bodies of the
                   "When the optional zip64 arg is None rather than ..." ...  same module

    so that it takes more than knowing the subject to tell them apart. No two queries are alike.
    The schema is that of ``microsoft/ms_marco``; "query_type" is the top-level module. Modules with
    fewer ``negatives`` are left out; ``seed`` draws them. Source and licence, and the script that
    collected them, are in the folder ``docstrings``.
    """
    with DOCSTRINGS.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    records = []
    for module, documented in groupby(entries, key=lambda entry: entry["module"]):
        of_module = list(documented)
        # Negatives are other docstrings of the module; it has not enough.
        if len(of_module) <= negatives:
            continue
        for entry in of_module:
            query_id = f"{module}:{entry['name']}"
            # A draw for each query: one docstring more in the file leaves the others' negatives
            # alone.
            key = hashlib.sha256(f"{seed} {query_id}".encode()).digest()
            others = [other["body"] for other in of_module if other is not entry]
            texts = [entry["body"], *random.Random(key).sample(others, negatives)]
            record = {
                "query_id": query_id,
                "query": entry["query"],
                "query_type": module.partition(".")[0],
                "passages": {
                    "is_selected": [1] + [0] * negatives,
                    "passage_text": texts,
                },
            }
            records.append(record)
    return records
