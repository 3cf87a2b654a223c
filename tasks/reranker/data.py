"""Re-ranking data: a query, the passage that answers it, and passages that do not.

In the order of the file: records and their checks, reading, holding out and selecting queries,
tokenising, the data module.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from tokenizers import Encoding
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase

from pl_pointwise.data import PointwiseDataModule
from pl_pointwise.errors import DataError
from pl_pointwise.tasks.models import model_source

from .corpus import docstring_rows

CHUNK = 256
"""Records handed to the tokenizer at a time."""

_CHOICE = "(invalid: skip leaves such records out.)"
_RULE = "those whose negatives' lengths vary most"
_NEEDS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test", "train"),
    "predict": ("predict",),
}
"""Data sets by stage; the first it cannot do without."""


# Records


@dataclass(frozen=True)
class Record:
    """One query and its candidate passages.

    Attributes:
        query: the text of the query.
        passages: the candidates; the positive first, where there is one.
        query_id: the data's own name of the query.
        where: file and line, or source and record, for messages.
    """

    query: str
    passages: tuple[str, ...]
    query_id: str | int | None
    where: str


Parser = Callable[[Any, str], Record]


def parse_labelled(row: Any, where: str, *, negatives: int, least: int, seed: int = 0) -> Record:
    """A record of the schema of ``microsoft/ms_marco``, the positive put first.

    Args:
        row: {"query", "passages": {"is_selected", "passage_text"}}, optionally "query_id".
        where: the row's place, for messages.
        negatives: the most negatives to keep. Of more, as many are drawn by ``seed`` and the row's
            own text, so the choice does not depend on the rest of the file.
        least: the fewest negatives allowed.
        seed: of that draw.
    """
    record = parse_candidates(row, where)
    passages = row["passages"]
    if not isinstance(passages, dict):
        raise _bad(where, "passages", "is a list", "Give {is_selected, passage_text}")
    selected = _field(passages, "is_selected", where, "passages.")
    if not isinstance(selected, list) or any(value not in (0, 1) for value in selected):
        problem = "is not a list of 0 and 1"
        raise _bad(where, "passages.is_selected", problem, "Mark the answer with 1")
    texts = record.passages
    if len(selected) != len(texts):
        problem = f"has {len(selected)} entries for {len(texts)} passages"
        raise _bad(where, "passages.is_selected", problem, "Give one entry for each passage")
    if sum(selected) != 1:
        problem = f"marks {sum(selected) or 'no'} passages"
        raise _bad(where, "passages.is_selected", problem, "Mark exactly one passage with 1")
    wrong = [text for text, mark in zip(texts, selected, strict=True) if not mark]
    if len(wrong) < least:
        problem = f"has {len(wrong)} passages besides the marked one, and {least} are needed"
        raise _bad(where, "passages.passage_text", problem, "Add some, or lower min_negatives")
    if len(wrong) > negatives:
        key = _digest(seed, record.query, *texts)
        wrong = [wrong[i] for i in sorted(random.Random(key).sample(range(len(wrong)), negatives))]
    return Record(record.query, (texts[selected.index(1)], *wrong), record.query_id, where)


def parse_candidates(row: Any, where: str) -> Record:
    """A record for prediction: any number of passages, in their order, labels ignored.

    Args:
        row: {"query", "passages"}, optionally "query_id"; the passages are a list of texts or
            {"passage_text": such a list}.
        where: the row's place, for messages.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: the record is {_kind(row)}. Give one object for each query.")
    query = _text(_field(row, "query", where), "query", where)
    query_id = row.get("query_id")
    if isinstance(query_id, str):
        query_id = _text(query_id, "query_id", where)
    elif isinstance(query_id, bool) or not isinstance(query_id, (int, type(None))):
        raise _bad(where, "query_id", f"is {_kind(query_id)}", "Give an integer or a text")
    passages, name = _field(row, "passages", where), "passages"
    if isinstance(passages, dict):
        passages = _field(passages, "passage_text", where, "passages.")
        name = "passages.passage_text"
    if not isinstance(passages, list):
        raise _bad(where, name, f"is {_kind(passages)}", "Give a list of texts")
    if not passages:
        raise _bad(where, name, "is empty", "Give at least one passage")
    texts = [_text(text, f"{name}[{i}]", where) for i, text in enumerate(passages)]
    return Record(query, tuple(texts), query_id, where)


def _field(row: dict[str, Any], name: str, where: str, prefix: str = "") -> Any:
    if name not in row:
        found = ", ".join(map(repr, row)) or "nothing"
        raise DataError(f'{where}: field "{prefix}{name}" is missing (found: {found}). Add it.')
    return row[name]


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise _bad(where, name, f"is {_kind(value)}", "Give a text")
    if not value.strip():
        raise _bad(where, name, "is empty", "Fill it in")
    if "\0" in value:
        raise _bad(where, name, "holds a NUL character", "Take it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        problem = "holds half of a surrogate pair, which is no Unicode text"
        raise _bad(where, name, problem, "Write the character itself") from None
    return value


def _bad(where: str, name: str, problem: str, remedy: str) -> DataError:
    return DataError(f'{where}: field "{name}" {problem}. {remedy}.')


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"of type {type(value).__name__}")


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# Reading


def read_records(path: str, parse: Parser, skip_invalid: bool | None = None) -> list[Record]:
    """The records of a Parquet file (by its ending) or of a file of JSON lines (any other).

    Empty lines are passed over.

    Args:
        path: the file.
        parse: makes a record of a row and the row's place.
        skip_invalid: leave out what is not a record and say how many, instead of stopping there.
            None is False where the user has no choice.

    Raises:
        DataError: a record that cannot be used (file, line, field, remedy), or no record at all.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file. Check the path.")
    records, skipped = [], []
    for where, raw in _parquet(path) if path.lower().endswith(".parquet") else _lines(path):
        try:
            records.append(parse(_decode(raw, where), where))
        except DataError as error:
            if skip_invalid is False:
                raise DataError(f"{error} {_CHOICE}") from error.__cause__
            if not skip_invalid:
                raise
            skipped.append(str(error))
    _report_skipped(path, skipped, len(records))
    if not records:
        raise DataError(f"{path}: no usable record. Give at least one.")
    return records


def _lines(path: str) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield f"{path}, line {number}", line


def _parquet(path: str) -> Iterator[tuple[str, Any]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
        found = file.schema_arrow.names
        if missing := {"query", "passages"}.difference(found):
            raise DataError(
                f'{path}: column "{min(missing)}" is missing (found: {", ".join(found)}). Add it.'
            )
        names = [name for name in ("query_id", "query", "passages") if name in found]
        number = 0
        for batch in file.iter_batches(CHUNK, columns=names):
            for scalar in batch.to_struct_array():
                number += 1
                yield f"{path}, record {number}", scalar
    except (pyarrow.ArrowException, OSError) as error:
        problem = f"not a readable Parquet file ({error})"
        raise DataError(f"{path}: {problem}. Write it again.") from error


def _decode(raw: Any, where: str) -> Any:
    """A row from a JSON line or an Arrow scalar."""
    try:
        if not isinstance(raw, bytes):
            return raw.as_py()
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        position = f"byte {error.start} of the {'line' if isinstance(raw, bytes) else 'text'}"
        raise DataError(f"{where}: not UTF-8 at {position}. Save the file as UTF-8.") from error
    except RecursionError:
        raise DataError(f"{where}: nested too deeply. Give one flat record a line.") from None
    except ValueError as error:
        problem = f"not a readable record ({error})"
        raise DataError(f"{where}: {problem}. Give one complete JSON object a line.") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        name = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f'field "{name}" stands twice')
    return row


def _report_skipped(source: str, problems: Sequence[str], kept: int) -> None:
    if problems:
        rank_zero_warn(
            f"{source}: left out {len(problems):,} of {kept + len(problems):,} records that cannot "
            f"be used; the first: {problems[0]}"
        )


# Holding out and selecting


def hold_out(groups: Sequence[str], share: float, seed: int = 0) -> list[bool]:
    """Which records to hold out so that no group stands on both sides.

    Groups are taken in an order drawn by ``seed``, each that does not push the held-out part above
    ``share`` of the records; the smallest alone where none fits. One group cannot be split.

    Args:
        groups: of each record, (N,).
        share: of the records to hold out, 0 for none.
        seed: of the order.
    """
    sizes = Counter(groups)
    held: set[str] = set()
    taken = 0
    order = sorted(sizes, key=lambda group: _digest(seed, group))
    for group in order:
        if taken + sizes[group] <= share * len(groups):
            held.add(group)
            taken += sizes[group]
    if not held and share > 0 and len(sizes) > 1:
        held.add(min(order, key=lambda group: sizes[group]))
    return [group in held for group in groups]


def length_variance(passage_lengths: Sequence[int]) -> float:
    """Variance of the negatives' lengths in tokens, leaving out the positive, which is first."""
    return float(np.var(passage_lengths[1:])) if len(passage_lengths) > 1 else 0.0


def largest(values: Sequence[float], count: int | None) -> list[int]:
    """Positions of the ``count`` largest values, in their order; of equal values the earlier.

    None takes all.
    """
    if count is None or count >= len(values):
        return list(range(len(values)))
    return sorted(np.argsort(-np.asarray(values), kind="stable")[:count].tolist())


# Tokenising


def split_template(template: str) -> tuple[str, str]:
    """What stands before the query and between query and passage.

    A template names {query}, then ends in {passage}: long inputs are cut at their end, and nothing
    but passage may be lost there. A brace that is text is doubled.

    Raises:
        DataError: any other template.
    """
    texts, fields = [""], []
    try:
        for text, *field in string.Formatter().parse(template):
            texts[-1] += text
            if field[0] is not None:
                fields.append(field)
                texts.append("")
    except ValueError:
        fields = []
    if fields != [["query", "", None], ["passage", "", None]] or texts[2]:
        raise DataError(
            f"template {template!r}: needs {{query}} once, then {{passage}} once and at its end. "
            f'For example "Query: {{query}}\\nPassage: {{passage}}".'
        )
    return texts[0], texts[1]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[str],
    passages: Sequence[str],
    *,
    max_length: int,
    template: str | None = None,
) -> BatchEncoding:
    """Token ids of (query, passage) pairs, unpadded: what ``CrossEncoder.predict`` feeds its model.

    Args:
        tokenizer: a fast tokenizer.
        queries: (P,) texts.
        passages: (P,) texts.
        max_length: the most tokens of a pair, special ones included; of longer pairs the longer
            text is cut first.
        template: one text for both, cut at its end, instead of a pair; see ``split_template``.

    Returns:
        The tokenizer's BatchEncoding of P inputs.
    """
    inputs: tuple[list[str], ...] = (list(queries), list(passages))
    if template is not None:
        before, between = split_template(template)
        inputs = ([f"{before}{q}{between}{p}" for q, p in zip(queries, passages, strict=True)],)
    return tokenizer(
        *inputs, truncation="longest_first", max_length=max_length, return_attention_mask=False
    )


def token_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Tokens of each text by itself: no special tokens, never cut."""
    if not texts:
        return []
    encoding = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    return [len(ids) for ids in encoding["input_ids"]]


class RerankerDataset:
    """Records tokenised once, their token ids in flat arrays.

    Row i is {"input_ids": C arrays (T,), "passage_lengths": (C,)}, with "token_type_ids" if the
    tokenizer makes them, and with query_id, query and passages if ``with_text``.

    Args:
        records: in the order of the data set.
        tokenizer: a fast tokenizer.
        max_length: see ``encode``.
        template: see ``encode``.
        name: of the data set, for messages.
        with_text: keep the texts in the rows.
        skip_invalid: leave out records of which a passage has no token in the input, and say how
            many, instead of stopping there.

    Raises:
        DataError: a passage of which no token is left, or no record.
    """

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        template: str | None = None,
        name: str = "data",
        with_text: bool = False,
        skip_invalid: bool = False,
    ) -> None:
        self.with_text = with_text
        self.records: list[Record] = []
        self._settings = (max_length, template, with_text)
        ids: list[Any] = []
        types: list[Any] = []
        lengths: list[int] = []
        skipped: list[str] = []
        pairs = truncated = 0
        if len(records) > 20 * CHUNK:
            rank_zero_info(f"{name}: tokenising the passages of {len(records):,} queries.")
        for start in range(0, len(records), CHUNK):
            part = records[start : start + CHUNK]
            passages = [passage for record in part for passage in record.passages]
            queries = [record.query for record in part for _ in record.passages]
            own = token_lengths(tokenizer, passages)
            encoding = encode(
                tokenizer, queries, passages, max_length=max_length, template=template
            )
            first = 0
            for record in part:
                mine = range(first, first := first + len(record.passages))
                problem = _lost(encoding, mine, own, record, max_length, template, not with_text)
                if problem is not None:
                    if not skip_invalid:
                        raise DataError(problem)
                    skipped.append(problem)
                    continue
                self.records.append(record)
                pairs += len(mine)
                truncated += sum(bool(encoding.encodings[i].overflowing) for i in mine)
                lengths += own[mine.start : mine.stop]
                ids += [np.asarray(encoding["input_ids"][i], np.int32) for i in mine]
                if "token_type_ids" in encoding:
                    types += [np.asarray(encoding["token_type_ids"][i], np.int8) for i in mine]
        _report_skipped(name, skipped, len(self.records))
        if not self.records:
            raise DataError(f"{name}: no usable record. Give at least one.")
        if truncated:
            rank_zero_info(
                f"{name}: {truncated:,} of {pairs:,} pairs are longer than max_length={max_length} "
                f"tokens and were cut."
            )
        self._ids = np.concatenate(ids)
        self._types = np.concatenate(types) if types else None
        self._ends = np.cumsum([0, *map(len, ids)])  # of pairs in the flat arrays
        self._lengths = np.asarray(lengths, np.float32)
        self._pairs = np.cumsum([0, *(len(record.passages) for record in self.records)])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(f"{position} of {len(self)} records")
        first, last = self._pairs[position : position + 2]
        row: dict[str, Any] = {
            "input_ids": self._cut(self._ids, first, last),
            "passage_lengths": self._lengths[first:last],
        }
        if self._types is not None:
            row["token_type_ids"] = self._cut(self._types, first, last)
        if self.with_text:
            record = self.records[position]
            row["query_id"], row["query"] = record.query_id, record.query
            row["passages"] = list(record.passages)
        return row

    def _cut(self, values: Any, first: int, last: int) -> list[Any]:
        ends = self._ends[first : last + 1]
        return [values[a:b] for a, b in pairwise(ends)]

    def record(self, position: int) -> Record:
        """The texts of a row, for reports."""
        return self.records[position]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the texts, their tokens and their order; not of where they were read."""
        digest = hashlib.sha256(json.dumps(self._settings).encode())
        for record in self.records:
            digest.update(json.dumps([record.query_id, record.query, record.passages]).encode())
        for values in (self._ids, self._types, self._ends, self._lengths):
            if values is not None:
                digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


def _lost(
    encoding: BatchEncoding,
    pairs: range,
    lengths: Sequence[int],
    record: Record,
    max_length: int,
    template: str | None,
    labelled: bool,
) -> str | None:
    """What to say if a passage of the record has no token in the input; None if each has one."""
    start = None
    if template is not None:
        before, between = split_template(template)
        start = len(before) + len(record.query) + len(between)
    for place, pair in enumerate(pairs):
        if lengths[pair] == 0:
            problem = "gives no token. Put words in it"
        elif not _keeps_passage(encoding.encodings[pair], start):
            problem = f"is cut away: the query fills max_length={max_length}. Raise max_length"
        else:
            continue
        which = f"number {place + 1}"
        if labelled:
            which = f"negative {place}" if place else "the positive"
        return f'{record.where}: field "passages": {which} {problem}, or take out the record.'
    return None


def _keeps_passage(tokens: Encoding, start: int | None) -> bool:
    """Whether a pair's second text, or a single text from character ``start`` on, has a token."""
    if not tokens.overflowing:
        return True
    if start is None:
        return 1 in tokens.sequence_ids
    return any(end > start for _, end in tokens.offsets)


# The data module


class RerankerDataModule(PointwiseDataModule):
    """Queries with one positive and up to ``negatives`` negative passages each, tokenised once.

    One raw record, the schema of ``microsoft/ms_marco`` v2.1, other fields ignored::

        {"query_id": 1115776, "query": "what is an aml surveillance analyst",
         "passages": {"is_selected": [0, 0, 1, ...],
                      "passage_text": ["Anti-Money Laundering Template ...", ...]}}

    and the batch of B such records, with C = 1 + negatives, candidate 0 the positive::

        index            (B,)       long     positions in the data set
        input_ids        (B, C, T)  long     padded with the tokenizer's pad token to the longest
        token_type_ids   (B, C, T)  long     only if the tokenizer makes them
        lengths          (B, C)     long     tokens of each pair; 0 where there is no candidate
        candidates       (B, C)     bool     False where a record has fewer than C candidates
        passage_lengths  (B, C)     float32  L of the objective: tokens of the passage by itself,
                                             no special tokens, before any cut

    For prediction (``predict_file``: JSON lines or Parquet of {query, passages}, the passages a
    list of texts or {passage_text: such a list}) the candidates keep their order, C is the most
    of a record in the batch, and lists "query_id", "query" and "passages" are added. Which pairs
    to pad with which is the module's business; padding in a batch costs bytes only.

    Sources of labelled records:
        embedded: docstrings of the standard library and of packages this project depends on
            (``corpus.py``); held out by module.
        hub: ``hub_path``, its splits "train" and "validation".
        files: ``train_file``, ``val_file``, ``test_file``; without ``val_file``, a part of the
            training queries, no query text on both sides.

    Test data are ``test_file``, else the validation data. Every set keeps the records whose
    negatives' lengths vary most, if it has more than its ``max_queries`` or ``val_queries``. A
    record whose passages are all of one length is kept; the length objective is 0 there.

    Args:
        model_name: the model whose tokenizer to use: a name on the hub, a folder, or
            ``package:NAME/FOLDER``.
        source: where labelled records come from.
        hub_path: the dataset on the hub, or a folder of the same layout.
        hub_config: its configuration.
        train_file: JSON lines, or Parquet by its ending ".parquet".
        val_file: as train_file.
        test_file: as train_file.
        predict_file: queries to predict for; of use with any source.
        invalid: what to do with a record that cannot be used: "error" or "skip", which says how
            many. None is "skip" for the hub, where queries with no or several marked passages are
            normal, and "error" otherwise. Records for prediction are never skipped.
        max_length: the most tokens of a pair, as in ``CrossEncoder``; of longer pairs the longer
            text is cut first.
        template: one text in place of a pair, such as "Query: {query}\\nSentence: {passage}".
        negatives: per query, K. Of more, a random choice.
        min_negatives: the fewest a record may have; None is ``negatives``.
        max_queries: the most training queries; None is all.
        val_queries: the most queries in validation and test data each; None is all.
        val_fraction: the part of the training queries to hold out where the source has no
            validation data; 0 holds out none. None is val_queries / (max_queries + val_queries),
            or 0.1 if one of them is all.
        batch_size: queries per rank in one optimisation step.
        eval_batch_size: queries per rank and evaluation batch; None is ``batch_size``.
        num_workers: loader processes.
        seed: of the order of training queries, the choice among negatives, and what is held out.
    """

    def __init__(
        self,
        model_name: str,
        *,
        source: Literal["embedded", "hub", "files"] = "embedded",
        hub_path: str = "microsoft/ms_marco",
        hub_config: str | None = "v2.1",
        train_file: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        invalid: Literal["error", "skip"] | None = None,
        max_length: int = 512,
        template: str | None = None,
        negatives: int = 9,
        min_negatives: int | None = None,
        max_queries: int | None = 50_000,
        val_queries: int | None = 5_000,
        val_fraction: float | None = None,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        least = negatives if min_negatives is None else min_negatives
        if not 1 <= least <= negatives:
            raise DataError(
                f"negatives={negatives}, min_negatives={least}: need 1 ≤ min_negatives ≤ negatives."
            )
        for option, count in (("max_queries", max_queries), ("val_queries", val_queries)):
            if count is not None and count < 1:
                raise DataError(f"{option}={count}: give at least 1, or null for all.")
        if val_fraction is None:
            val_fraction = 0.1
            if max_queries is not None and val_queries is not None:
                val_fraction = val_queries / (max_queries + val_queries)
        if not 0 <= val_fraction < 1:
            raise DataError(f"val_fraction={val_fraction}: give a number from 0 to below 1.")
        if source not in ("embedded", "hub", "files"):
            raise DataError(f"source={source!r}: give embedded, hub or files.")
        if invalid not in ("error", "skip", None):
            raise DataError(f"invalid={invalid!r}: give error or skip.")
        if source != "files" and (train_file or val_file or test_file):
            raise DataError(f"source={source}: it takes no files. Set source to files.")
        if source == "files" and not (train_file or val_file or test_file or predict_file):
            raise DataError("source=files: it needs train_file, val_file or test_file.")
        if template is not None:
            split_template(template)
        self.model_name = model_name
        self.source = source
        self.hub_path, self.hub_config = hub_path, hub_config
        self.files = {
            "train": train_file,
            "val": val_file,
            "test": test_file,
            "predict": predict_file,
        }
        self.skip_invalid = invalid == "skip" or (invalid is None and source == "hub")
        self.max_length, self.template = max_length, template
        self.negatives, self.min_negatives = negatives, least
        self.max_queries, self.val_queries = max_queries, val_queries
        self.val_fraction = val_fraction
        self._records: dict[str, list[Record]] = {}

    def prepare_data(self) -> None:
        """Fill the hub's caches, once a node."""
        stage = self.trainer.state.fn if self.trainer else None
        if self.source == "hub":
            for name in _NEEDS.get(stage or "fit", ()):
                if name != "predict":
                    self._measure(self._hub(name), name)

    def setup(self, stage: str | None = None) -> None:
        """Read, select and tokenise what ``stage`` needs and is not there yet.

        Testing takes in the training data too, where there are any: the difference is a result.
        """
        for each in _NEEDS if stage is None else [stage]:
            for name in _NEEDS[each]:
                self._add(name)
        if stage is not None and _NEEDS[stage][0] not in self.datasets:
            raise DataError(
                f"There are no data for {_NEEDS[stage][0]} with source={self.source}. Set "
                f"{_NEEDS[stage][0]}_file, or val_fraction above 0 to hold out training queries."
            )

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of the class docstring, of rows of a :class:`RerankerDataset` with an index."""
        prediction = "query" in rows[0]
        counts = [len(row["input_ids"]) for row in rows]
        width = max(counts) if prediction else 1 + self.negatives
        longest = max(len(ids) for row in rows for ids in row["input_ids"])
        shape = (len(rows), width)
        ids = np.full((*shape, longest), self._tokenizer.pad_token_id, np.int64)
        types = np.zeros((*shape, longest), np.int64)
        lengths = np.zeros(shape, np.int64)
        passage_lengths = np.zeros(shape, np.float32)
        for i, row in enumerate(rows):
            passage_lengths[i, : counts[i]] = row["passage_lengths"]
            for j, pair in enumerate(row["input_ids"]):
                lengths[i, j] = len(pair)
                ids[i, j, : len(pair)] = pair
                if "token_type_ids" in row:
                    types[i, j, : len(pair)] = row["token_type_ids"][j]
        batch: dict[str, Any] = {
            "index": torch.tensor([row["index"] for row in rows]),
            "input_ids": torch.from_numpy(ids),
            "lengths": torch.from_numpy(lengths),
            "candidates": torch.from_numpy(lengths > 0),
            "passage_lengths": torch.from_numpy(passage_lengths),
        }
        if "token_type_ids" in rows[0]:
            batch["token_type_ids"] = torch.from_numpy(types)
        if prediction:
            batch |= {
                name: [row[name] for row in rows] for name in ("query_id", "query", "passages")
            }
        return batch

    def _add(self, name: str) -> None:
        """Put the data set ``name`` into ``datasets``, if its source has it."""
        if name in self.datasets:
            return
        if name == "predict":
            if path := self.files[name]:
                records = read_records(path, parse_candidates)
                self.datasets[name] = self._dataset(name, records)
            return
        if name not in self._records:
            self._records |= self._read(name)
        if name in self._records:
            self.datasets[name] = self._dataset(name, self._records[name])
        elif name == "test":
            self._add("val")
            if "val" in self.datasets:
                self.datasets["test"] = self.datasets["val"]

    def _dataset(self, name: str, records: Sequence[Record]) -> RerankerDataset:
        return RerankerDataset(
            records,
            self._tokenizer,
            max_length=self.max_length,
            template=self.template,
            name=name,
            with_text=name == "predict",
            skip_invalid=self.skip_invalid and name != "predict",
        )

    def _read(self, name: str) -> dict[str, list[Record]]:
        """The selected records of ``name`` and of whatever has to be read along with it."""
        if self.source == "hub":
            return {} if name == "test" else {name: self._from_hub(name)}
        records = self._from_files() if self.source == "files" else self._from_corpus()
        return {name: self._select(name, those) for name, those in records.items()}

    def _from_corpus(self) -> dict[str, list[Record]]:
        enough = None
        if self.max_queries is not None and self.val_queries is not None:
            enough = self.max_queries + self.val_queries
        rows = docstring_rows(self.negatives, enough, self.seed)
        if not rows:
            raise DataError(
                f"The embedded corpus has no module with {self.negatives + 1} docstrings here. "
                f"Lower negatives, or set source to files."
            )
        records = [self._parse(row, f"embedded corpus, {row['query_id']}") for _, row in rows]
        return self._split(records, [group for group, _ in rows])

    def _from_files(self) -> dict[str, list[Record]]:
        read = {
            name: read_records(path, self._parse, self.skip_invalid)
            for name, path in self.files.items()
            if path and name != "predict"
        }
        if "val" not in read and "train" in read:
            queries = [_same_query(record) for record in read["train"]]
            read |= self._split(read["train"], queries)
        known = {_same_query(record) for record in read.get("train", [])}
        for name in ("val", "test"):
            shared = sum(_same_query(record) in known for record in read.get(name, []))
            if shared:
                rank_zero_warn(
                    f"{self.files[name]}: {shared:,} of {len(read[name]):,} queries are in "
                    f"{self.files['train']} too, so figures on it flatter. Take them out of one."
                )
        return read

    def _split(self, records: list[Record], groups: list[str]) -> dict[str, list[Record]]:
        if self.val_fraction == 0:
            return {"train": records}
        held = hold_out(groups, self.val_fraction, self.seed)
        if not any(held):
            raise DataError(
                f"{records[0].where}: all records are of one query or module, so there are none to "
                f"hold out. Set val_file, or val_fraction to 0."
            )
        sides: dict[str, list[Record]] = {"train": [], "val": []}
        for record, out in zip(records, held, strict=True):
            sides["val" if out else "train"].append(record)
        return sides

    def _limit(self, name: str) -> int | None:
        return self.max_queries if name == "train" else self.val_queries

    def _select(self, name: str, records: list[Record]) -> list[Record]:
        limit = self._limit(name)
        if limit is None or len(records) <= limit:
            return records
        chosen = largest(_variances(self._tokenizer, records), limit)
        rank_zero_info(f"{name}: kept {limit:,} of {len(records):,} queries, {_RULE}.")
        return [records[i] for i in chosen]

    def _hub(self, name: str) -> Any:
        """The split of the dataset on the hub that serves as ``name``."""
        import datasets

        split = "train" if name == "train" else "validation"
        try:
            return datasets.load_dataset(self.hub_path, self.hub_config, split=split)
        except Exception as error:  # of network, hub, cache or files: they share no base
            raise DataError(
                f"{self.hub_path} ({self.hub_config}, {split}) cannot be loaded: {error}. Check "
                f"name and network, or set source to files or embedded."
            ) from error

    def _measure(self, rows: Any, name: str) -> tuple[list[str], list[float]]:
        """Of each row on the hub what is wrong with it ("" if nothing) and its length variance.

        The datasets library keeps the result in its cache.
        """

        def measure(batch: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
            problems, records = [], []
            for place, values in zip(places, zip(*batch.values(), strict=True), strict=True):
                try:
                    row = dict(zip(batch, values, strict=True))
                    records.append(self._parse(row, self._place(name, place)))
                    problems.append("")
                except DataError as error:
                    problems.append(str(error))
            variances = iter(_variances(self._tokenizer, records))
            return {
                "problem": problems,
                "variance": [0.0 if problem else next(variances) for problem in problems],
            }

        tokenizer = json.loads(self._tokenizer.backend_tokenizer.to_str())
        tokenizer |= {"truncation": None, "padding": None}  # states of its last use
        counts = self.negatives, self.min_negatives, self.seed
        key = _digest(rows._fingerprint, self._place(name, 0), tokenizer, counts)
        measured = rows.map(
            measure,
            batched=True,
            batch_size=CHUNK,
            with_indices=True,
            remove_columns=rows.column_names,
            new_fingerprint=key[:32],
            desc=f"{name}: lengths of passages",
        )
        columns = measured[:]
        return columns["problem"], columns["variance"]

    def _from_hub(self, name: str) -> list[Record]:
        rows = self._hub(name)
        problems, variances = self._measure(rows, name)
        usable = [i for i, problem in enumerate(problems) if not problem]
        wrong = [problem for problem in problems if problem]
        if wrong and not self.skip_invalid:
            raise DataError(f"{wrong[0]} {_CHOICE}")
        _report_skipped(f"{self.hub_path}, {name}", wrong, len(usable))
        chosen = [usable[i] for i in largest([variances[i] for i in usable], self._limit(name))]
        rank_zero_info(f"{name}: kept {len(chosen):,} of {len(usable):,} queries, {_RULE}.")
        return [
            self._parse(row, self._place(name, i))
            for i, row in zip(chosen, rows.select(chosen), strict=True)
        ]

    def _place(self, name: str, position: int) -> str:
        return f"{self.hub_path}, {name}, record {position + 1}"

    def _parse(self, row: Any, where: str) -> Record:
        return parse_labelled(
            row, where, negatives=self.negatives, least=self.min_negatives, seed=self.seed
        )

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        source = model_source(self.model_name)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if not tokenizer.is_fast or tokenizer.pad_token_id is None:
            raise DataError(
                f"{self.model_name}: its tokenizer is slow or has no pad token. Take an encoder "
                f"with a fast tokenizer and a pad token."
            )
        least = tokenizer.num_special_tokens_to_add(pair=self.template is None) + 2
        if not least <= self.max_length <= tokenizer.model_max_length:
            raise DataError(
                f"max_length={self.max_length}: {self.model_name} takes from {least} to "
                f"{tokenizer.model_max_length:,} tokens. Set max_length within that."
            )
        return tokenizer


def _same_query(record: Record) -> str:
    return " ".join(record.query.casefold().split())


def _variances(tokenizer: PreTrainedTokenizerBase, records: Sequence[Record]) -> list[float]:
    variances = []
    for start in range(0, len(records), CHUNK):
        part = records[start : start + CHUNK]
        lengths = iter(token_lengths(tokenizer, [text for r in part for text in r.passages]))
        variances += [length_variance([next(lengths) for _ in r.passages]) for r in part]
    return variances
