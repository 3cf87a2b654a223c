"""Where safety records come from, and to which split each belongs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.data import SPLITS
from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import largest
from pl_pointwise.tasks.common.splits import (
    prompt_groups,
    side_of_held_out,
    sources_of,
    warn_of_shared,
)
from pl_pointwise.tasks.language_model.data import ResponseDataModule
from pl_pointwise.tasks.language_model.messages import answer_text

from .records import (
    HELPFUL,
    AnswerPair,
    Judgement,
    Parser,
    Record,
    Selection,
    once,
    parse_borderline,
    parse_instruction,
    parse_judgement,
    parse_labelled,
    parse_pair,
    parse_prompt,
    per_category,
    preference_pairs,
    unanimous,
    unsafe_prompts,
)

BORDERLINE = ("borderline", "borderline_val", "borderline_test")
"""The options of borderline records, without ``_file``."""


class SafetySources(ResponseDataModule):
    """Benign, unsafe and borderline records by split, and the prompts that are only tested on."""

    files: dict[str, str | None]  # of each file option its path, without ``_file``
    unsafe_schema: str | None
    selection: Selection

    def _read_splits(self) -> None:
        """Benign, unsafe and borderline records of all splits, once."""
        if any(side in self._records for side in SPLITS):
            return
        kinds = {"benign": self._benign()}
        if self.unsafe_schema is not None:
            kinds["unsafe"] = self._unsafe()
        if any(self.files[name] for name in BORDERLINE):
            kinds["borderline"] = self._sides("borderline", parse_borderline)
        sides = {
            side: [record for found in kinds.values() for record in found.get(side, [])]
            for side in SPLITS
        }
        for kind, found in kinds.items():
            if sides["test"] and not found.get("test"):
                rank_zero_warn(
                    f"test: there is no {kind} record, so nothing is certified about such prompts. "
                    f"Set {kind}_test_file, or preparation.test_fraction above 0."
                )
        safe = {record.unit for record in sides["train"] if not record.unsafe}
        if both := sum(record.unit in safe for record in sides["train"] if record.unsafe):
            rank_zero_warn(
                f"train: {both:,} unsafe records have a prompt that is a benign or borderline one "
                "too, so it is to be answered and refused. Take it out of one."
            )
        self._records |= {side: records for side, records in sides.items() if records}

    def _benign(self) -> dict[str, list[Record]]:
        """Benign records by side."""
        if self.source == "files":
            return self._sides("benign", parse_instruction, self.selection.benign_count)
        records = self._from_hub(self.selection.alpaca_path, None, "train", parse_instruction)
        train = _longest(records, self.selection.benign_count)
        others = _without(train, records)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(len(others), generator=generator)[: self.selection.benign_held_out]
        held = [others[position] for position in sorted(drawn.tolist())]
        return {"train": train, **self._divided(held)}

    def _unsafe(self) -> dict[str, list[Record]]:
        """Unsafe records by side."""
        if self.unsafe_schema == "labelled":
            return self._sides("unsafe", parse_labelled)
        if self.unsafe_schema == "beavertails":
            if self.source == "hub":
                path, split = self.selection.beavertails_path, "330k_train"
                return self._by_category(self._from_hub(path, None, split, parse_judgement))
            file = self.files["unsafe"]
            rows = self._from_file("train", file, parse_judgement) if file else []
            return self._by_category(rows) if file else {}
        if self.source == "files":
            return self._sides("unsafe", parse_pair)
        path = self.selection.pku_path
        train, held = (
            self._pku(self._from_hub(path, None, split, parse_pair)) for split in ("train", "test")
        )
        return {"train": train, **self._divided(_without(train, held))}

    def _by_category(self, judgements: Iterable[Judgement]) -> dict[str, list[Record]]:
        found, limits = unanimous(judgements, self.selection.categories), self.selection
        for name, records in found.items():
            if len(records) < limits.per_category:
                rank_zero_warn(
                    f"{name}: {len(records):,} answers have more than two annotators who all agree "
                    f"about it, fewer than per_category={limits.per_category:,}. All are taken."
                )
        train, held = per_category(
            found, limits.per_category, limits.held_out_per_category, self.seed
        )
        path = self.files["unsafe_test"]
        if path is None:
            return {"train": train, **self._divided(held)}
        rows = self._from_file("test", path, parse_judgement)
        test = [each for group in unanimous(rows, limits.categories).values() for each in group]
        splits = {"train": train, "val": held, "test": test}
        warn_of_shared(splits, sources_of(self._paths("unsafe"), splits))
        return splits

    def _divided(self, held: Sequence[Record]) -> dict[str, list[Record]]:
        """Records that are held out already, divided into "val" and "test"."""
        categories = [record.category for record in held]
        val, test = self.preparation.val_fraction, self.preparation.test_fraction
        sides = side_of_held_out(prompt_groups(held), val, test, self.seed, categories)
        return {
            name: [record for record, side in zip(held, sides, strict=True) if side == name]
            for name in SPLITS
            if name in sides
        }

    def _pku(self, pairs: Sequence[AnswerPair]) -> list[Record]:
        as_pairs = self.unsafe_schema == "pku_pairs"
        return preference_pairs(pairs) if as_pairs else unsafe_prompts(pairs)

    def _sides(self, kind: str, parse: Parser, count: int | None = None) -> dict[str, list[Record]]:
        """Records of the files of a kind by side: files of their own, or parts held out."""
        found: dict[str, list[Record]] = {}
        paths = self._paths(kind)
        for side, path in paths.items():
            if path is not None:
                rows = self._from_file(side, path, parse)
                found[side] = self._pku(rows) if parse is parse_pair else rows
                if kind == "borderline":
                    found[side] = _safe_half(rows, path)
        # What is held out is not chosen by length: a certificate speaks of new prompts.
        found = self._split(found, paths)
        if train := found.get("train"):
            found["train"] = _longest(train, count)
        return found

    def _paths(self, kind: str) -> dict[str, str | None]:
        """By side the file of a kind."""
        options = (kind, *(f"{kind}_{side}" for side in SPLITS[1:]))
        return {side: self.files[name] for side, name in zip(SPLITS, options, strict=True)}

    def _read(self, name: str) -> list[Record]:
        """The records of a data set that is only tested on or predicted for."""
        if name in self._records:
            return self._records[name]
        path = self.files["over_refusal" if name == "contrast" else name]
        source, records = path or f"{self.selection.pku_path}, test", []
        if name == "pku":
            if path is not None:
                records = once(unsafe_prompts(self._from_file(name, path, parse_pair)))
            elif self.source == "hub" and self.unsafe_schema == "beavertails":
                pairs = self._from_hub(self.selection.pku_path, None, "test", parse_pair)
                records = once(unsafe_prompts(pairs))
        elif path is not None:
            records = self._from_file(name, path, parse_prompt)
            if name == "over_refusal":
                records = _safe_half(records, path)
            elif name == "contrast":
                records = [record for record in records if record.unsafe]
        if records and name in ("pku", "over_refusal", "contrast") and "train" in self._records:
            splits = {"train": self._records["train"], name: records}
            warn_of_shared(splits, {"train": "the training set", name: source})
        self._records[name] = records
        return records


def _longest(records: Sequence[Record], count: int | None) -> list[Record]:
    """The records with the longest answers, in characters; ties take the first."""
    lengths = [
        sum(len(answer_text(each.answer or "")) for each in r.responses if each.role == HELPFUL)
        for r in records
    ]
    return [records[position] for position in largest(lengths, count)]


def _without(known: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """The records whose prompts are none of the known ones."""
    units = {record.unit for record in known}
    return [record for record in records if record.unit not in units]


def _safe_half(records: Sequence[Record], path: str) -> list[Record]:
    """The records without XSTest's unsafe ones.

    Raises:
        DataError: nothing is left.
    """
    if safe := [record for record in records if not record.unsafe]:
        return safe
    raise DataError(f"{path}: all prompts are unsafe ones. Give safe ones.")
