"""Re-ranking data: where records come from, which are held out and kept, and the data module."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pl_pointwise.data import PointwiseDataModule
from pl_pointwise.errors import DataError, one_of
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.models import limits_of_model, loading, model_source
from pl_pointwise.tasks.common.records import (
    check_source,
    digest,
    hub_split,
    largest,
    records_of,
    refused,
    report_skipped,
    rows_of,
)
from pl_pointwise.tasks.common.splits import (
    check_fractions,
    side_of_held_out,
    split_by_group,
    with_held_out,
)

from .corpus import docstring_records
from .encoding import RerankerDataset, split_template, token_lengths
from .records import Record, check_together, parse_candidates, parse_labelled, parse_positives

_NEEDS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test", "train"),
    "predict": ("predict",),
}
"""Data sets by stage; the first it cannot do without."""


class RerankerDataModule(PointwiseDataModule):
    """Queries with one positive and up to ``negatives`` negative passages each, tokenised once.

    The schemas of raw records are those of docs/reranker.md; of files, a record with several
    positives is a sample for each. A batch of B records, with C = 1 + negatives, candidate 0 the
    positive::

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

    Test data are ``test_file``, else what ``test_fraction`` or ``test_queries`` holds out, else the
    validation data. A set with more records than its ``max_queries``, ``val_queries`` or
    ``test_queries`` keeps those whose negatives' lengths vary most, as the paper does. Where there
    are test data of their own, "val" and "test" are random draws instead: a certificate speaks of
    new queries, and queries chosen by length are not like them.

    Args:
        model_name: the model whose tokenizer to use. This, max_length and template are the
            module's: give them here only to use the data without one.
        max_length: as the module's.
        template: as the module's.
        source: "embedded" are docstrings that ship with this package (``corpus.py``), held out by
            module; "hub" is ``hub_path``, its splits "train" and "validation"; of the training
            queries of "files" a part is held out, of each query_type the same, by query text.
        hub_path: the dataset on the hub, or a folder of the same layout.
        hub_config: its configuration.
        train_file: JSON lines, or Parquet by its ending ".parquet".
        val_file: as train_file.
        test_file: as train_file.
        predict_file: queries to predict for; of use with any source.
        invalid: what to do with a record that cannot be used: "error" or "skip". None is "skip" for
            the hub, where queries with no or several marked passages are normal, and "error"
            otherwise. Records for prediction are never skipped.
        negatives: K per query, a random choice if there are more.
        min_negatives: the fewest a record may have; None is ``negatives``.
        max_queries: the most training queries; None is all.
        val_queries: the most queries in validation data; None is all.
        test_queries: the most queries in test data; None takes val_queries.
        val_fraction: the part of the training queries to hold out where the source has no
            validation data. None is val_queries / (max_queries + val_queries + test_queries), or
            0.1 if max_queries or val_queries is all.
        test_fraction: the same as test data, to certify. At 0 it follows from test_queries, where
            these are given. The hub's "validation" is divided in the proportion of both fractions.
        options: of `PointwiseDataModule`; ``seed`` also of what is held out and which negatives.
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        max_length: int | None = None,
        template: str | None = None,
        source: Literal["embedded", "hub", "files"] = "embedded",
        hub_path: str = "microsoft/ms_marco",
        hub_config: str | None = "v2.1",
        train_file: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        invalid: Literal["error", "skip"] | None = None,
        negatives: int = 9,
        min_negatives: int | None = None,
        max_queries: int | None = 50_000,
        val_queries: int | None = 5_000,
        test_queries: int | None = None,
        val_fraction: float | None = None,
        test_fraction: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("source", source, ("embedded", "hub", "files"), DataError)
        one_of("invalid", invalid, ("error", "skip", None), DataError)
        self.files = {"train": train_file, "val": val_file, "test": test_file}
        labelled = any(self.files.values())
        check_source(source, labelled, predict_file, "train_file, val_file or test_file")
        self.predict_file = predict_file
        least = negatives if min_negatives is None else min_negatives
        if not 1 <= least <= negatives:
            raise DataError(
                f"negatives={negatives}, min_negatives={least}: need 1 ≤ min_negatives ≤ negatives."
            )
        self.limits = {"train": max_queries, "val": val_queries, "test": test_queries}
        for split, count in self.limits.items():
            if count is not None and count < 1:
                option = "max" if split == "train" else split
                raise DataError(f"{option}_queries={count}: give at least 1, or null for all.")
        if template is not None:
            split_template(template)
        self.source = source
        self.skip_invalid = invalid == "skip" or (invalid is None and source == "hub")
        self._given = {"model_name": model_name, "max_length": max_length, "template": template}
        self.hub_path, self.hub_config = hub_path, hub_config
        self.negatives = negatives
        self._counts: dict[str, Any] = {"negatives": negatives, "least": least, "seed": self.seed}
        self.val_fraction, self.test_fraction = _fractions(val_fraction, test_fraction, self.limits)
        if test_queries is None:
            self.limits["test"] = val_queries
        self._format: dict[str, Any] = {}
        self._records: dict[str, list[Record]] = {}

    def prepare_data(self) -> None:
        """Fill the hub's caches, once a node."""
        self._agree_with_module()
        stage = self.trainer.state.fn if self.trainer else None
        for name in _NEEDS[stage or "fit"] if self.source == "hub" else ():
            self._read(name)

    def setup(self, stage: str | None = None) -> None:
        """Read, select and tokenise what ``stage`` needs and is not there yet."""
        self._agree_with_module()
        for name in chain(*_NEEDS.values()) if stage is None else _NEEDS[stage]:
            origin = "val" if name == "test" and not self._read("test") else name
            if origin not in self.datasets and (records := self._read(origin)):
                self.datasets[origin] = RerankerDataset(
                    records,
                    self._tokenizer,
                    max_length=self._format["max_length"],
                    template=self._format["template"],
                    rows=limits_of_model(self.trainer)[1],
                    name=origin,
                    skip_invalid=self.skip_invalid and name != "predict",
                )
            if origin in self.datasets:
                self.datasets[name] = self.datasets[origin]
        if stage is not None and _NEEDS[stage][0] not in self.datasets:
            raise DataError(
                f"There are no data for {_NEEDS[stage][0]} with source={self.source}. Set "
                f"{_NEEDS[stage][0]}_file, or val_fraction above 0 to hold out training queries."
            )

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """The batch of the class docstring, of rows of a :class:`RerankerDataset` with an index."""
        counts = torch.tensor([len(row["input_ids"]) for row in rows])
        predicting = "query_id" in rows[0]
        width = int(counts.max()) if predicting else 1 + self.negatives
        candidates = torch.arange(width) < counts[:, None]

        def scattered(values: Tensor, filler: float = 0) -> Tensor:
            """(n, …) of the candidates in their order → (B, C, …)."""
            found = values.new_full((*candidates.shape, *values.shape[1:]), filler)
            found[candidates] = values
            return found

        pairs = [len(pair) for row in rows for pair in row["input_ids"]]
        alone = np.concatenate([row["passage_lengths"] for row in rows])
        batch: Batch = {
            "index": torch.tensor([row["index"] for row in rows]),
            "lengths": scattered(torch.tensor(pairs)),
            "candidates": candidates,
            "passage_lengths": scattered(torch.from_numpy(alone)),
        }
        fillers = {"input_ids": self._tokenizer.pad_token_id, "token_type_ids": 0}
        for name in fillers.keys() & rows[0].keys():
            values = [torch.from_numpy(each) for row in rows for each in row[name]]
            padded = pad_sequence(values, batch_first=True, padding_value=fillers[name]).long()
            batch[name] = scattered(padded, fillers[name])
        if predicting:
            batch["query_id"] = [row["query_id"] for row in rows]
        return batch

    def describe(self, index: int) -> dict[str, str]:
        """The texts of training query ``index``; column j of the constraint is negative j + 1."""
        dataset = self.datasets["train"]
        assert isinstance(dataset, RerankerDataset)
        record = dataset.records[index]
        passages = {f"negative {j}" if j else "positive": t for j, t in enumerate(record.passages)}
        return {"record": record.where, "query": record.query, **passages}

    def _agree_with_module(self) -> None:
        """Take the input format from the module; with another one, everything is made again."""
        agreed = {name: self.shared_option(name, own) for name, own in self._given.items()}
        agreed["max_length"] = 512 if agreed["max_length"] is None else agreed["max_length"]
        if agreed["model_name"] is None:
            raise DataError(
                "model_name: the data need a tokenizer. Name one, or use them with RerankerModule."
            )
        if agreed != self._format:
            self._tokenizer = _load_tokenizer(**agreed)
            self._format = agreed
            self.datasets, self._records = {}, {}

    def _read(self, name: str) -> list[Record]:
        """The selected records of a data set; none where its source has none."""
        if name == "predict":
            path = self.predict_file
            return records_of(rows_of(path), path, parse_candidates) if path else []
        if self.source == "hub" and name not in self._records:
            self._records |= self._from_hub("train" if name == "train" else "validation")
        elif not self._records:
            for split, records in self._split().items():
                variances = (_variance(self._tokenizer, record) for record in records)
                kept = self._kept(split, range(len(records)), variances)
                self._records[split] = [records[position] for position in kept]
        return self._records.get(name, [])

    def _split(self) -> dict[str, list[Record]]:
        """All records of files, or of the embedded corpus, by data set."""
        shares = {"val": self.val_fraction, "test": self.test_fraction}
        if self.source == "files":
            read = {name: self._read_file(path) for name, path in self.files.items() if path}
            return with_held_out(read, shares, self.seed, self.files, ("query", "queries"))
        records = [
            parse_labelled(row, f"embedded corpus, {row['query_id']}", **self._counts)
            for row in docstring_records(self.negatives, self.seed)
        ]
        if not records:
            raise DataError("The embedded corpus has no module with so many negatives. Lower them.")
        modules = [record.category for record in records]
        return split_by_group(records, modules, shares, self.seed, "module")

    def _kept(self, name: str, usable: Sequence[int], variances: Iterable[float]) -> Sequence[int]:
        """Which usable queries a split keeps; of each the variance of its negatives' lengths."""
        limit = self.limits[name]
        if limit is None or len(usable) <= limit:
            return usable
        if name != "train" and (self.test_fraction or self.files["test"]):
            rule = "drawn at random"
            chosen = random.Random(digest(self.seed, name)).sample(range(len(usable)), limit)
            chosen.sort()
        else:
            rule = "those whose negatives' lengths vary most"
            chosen = largest([*variances], limit)
        rank_zero_info(f"{name}: kept {limit:,} of {len(usable):,} queries, {rule}.")
        return [usable[position] for position in chosen]

    def _from_hub(self, split: str) -> dict[str, list[Record]]:
        """The records of "train", or of "val" and "test", which divide the hub's "validation"."""
        rows = hub_split(self.hub_path, self.hub_config, split, "files or embedded")
        source = f"{self.hub_path}, {split}"

        def parse(row: Any, position: int) -> Record:
            return parse_labelled(row, f"{source}, record {position + 1}", **self._counts)

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
        key = digest(rows._fingerprint, source, backend.to_str(), [*self._counts.values(), "row"])
        options: dict[str, Any] = {"with_indices": True, "new_fingerprint": key[:32]}
        measured = rows.map(measure, remove_columns=rows.column_names, **options)
        problems, variances = measured["problem"][:], measured["variance"][:]
        usable = [i for i, problem in enumerate(problems) if not problem]
        if wrong := [*filter(None, problems)]:
            refused(DataError(wrong[0]), self.skip_invalid)
            report_skipped(source, wrong, len(usable))
        sides = ["train"] * len(usable)
        if split != "train":
            records = [parse(rows[i], i) for i in usable]
            units, shares = [each.unit for each in records], (self.val_fraction, self.test_fraction)
            kinds = [each.category for each in records]
            sides = side_of_held_out(units, *shares, self.seed, kinds)
        found = {}
        for name in ("train",) if split == "train" else ("val", "test"):
            own = [i for i, side in zip(usable, sides, strict=True) if side == name]
            kept = self._kept(name, own, (variances[i] for i in own))
            found[name] = [parse(rows[i], i) for i in kept]
        return found

    def _read_file(self, path: str) -> list[Record]:
        """A record for each answer of each row."""
        parse = partial(parse_positives, **self._counts)
        records = [*chain(*records_of(rows_of(path), path, parse, self.skip_invalid))]
        check_together(records)
        return records


def _fractions(
    val: float | None, test: float, wanted: dict[str, int | None]
) -> tuple[float, float]:
    """The parts of the training queries to hold out, from the numbers wanted if not given."""
    known = None not in (wanted["train"], wanted["val"])
    total = sum(filter(None, wanted.values()))
    shares = {name: (count or 0) / total if known else 0.1 for name, count in wanted.items()}
    val = shares["val"] if val is None else val
    test = shares["test"] if test == 0 and wanted["test"] is not None else test
    check_fractions(val, test)
    return val, test


def _load_tokenizer(
    model_name: str, max_length: int, template: str | None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model, if it can make such inputs."""
    with loading(model_name):
        source = model_source(model_name)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if not tokenizer.is_fast or tokenizer.pad_token_id is None:
        raise DataError(
            f"{model_name}: take an encoder with a fast tokenizer that has a pad token."
        )
    least = tokenizer.num_special_tokens_to_add(pair=template is None) + 2
    if not least <= max_length <= tokenizer.model_max_length:
        raise DataError(
            f"max_length={max_length}: {model_name} takes from {least} to "
            f"{tokenizer.model_max_length:,} tokens."
        )
    return tokenizer


def _variance(tokenizer: PreTrainedTokenizerBase, record: Record) -> float:
    """Variance of the lengths of a query's negatives in tokens; the positive is the first."""
    return float(np.var(token_lengths(tokenizer, record.passages[1:])))
