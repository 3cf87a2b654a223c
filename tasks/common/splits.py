"""Which records are trained on, which select and which certify: no group stands on two sides.

A record has ``where``, its place, ``prompt``, ``unit``, which all prompts that are alike share, and
``category``. What is held out depends on the records and a seed alone. The parts are drawn one
after the other, "val" before "test", so that "val" is the same with and without a "test".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pl_pointwise.errors import DataError

from .records import digest


def check_fractions(val: float, test: float) -> None:
    """Raises :class:`DataError`: a fraction out of its range, or nothing left to train on."""
    if val < 0 or test < 0 or val + test >= 1:
        raise DataError(
            f"val_fraction={val}, test_fraction={test}: give numbers from 0 to below 1 whose sum "
            "leaves something to train on."
        )


def hold_out(
    groups: Sequence[str],
    shares: Sequence[float],
    seed: int = 0,
    categories: Sequence[str] | None = None,
) -> list[int]:
    """The part of each record, (N,): 0 for training, j for the j-th held-out part.

    Groups are taken in an order drawn by ``seed``, over which each of the ``categories`` is evenly
    spread: each group that does not push the part above its share of the records; the smallest
    alone where none fits. A group of each category stays in training.
    """
    sizes = Counter(groups)
    kind = dict(zip(groups, categories or [""] * len(groups), strict=True))
    part_of, left = dict[str, int](), Counter(kind.values())
    place, seen = dict[str, float](), Counter[str]()
    for group in sorted(sizes, key=lambda group: digest(seed, group)):
        place[group] = (seen[kind[group]] + 0.5) / left[kind[group]]  # Evenly between 0 and 1.
        seen[kind[group]] += 1
    order = sorted(place, key=place.__getitem__)
    for part, share in enumerate(shares, start=1):
        size = 0
        for group in order:
            fits = size + sizes[group] <= share * len(groups)
            # The last group of a category stays, as else nothing teaches what it asks.
            if fits and group not in part_of and left[kind[group]] > 1:
                part_of[group] = part
                size, left[kind[group]] = size + sizes[group], left[kind[group]] - 1
        others = [each for each in order if each not in part_of and left[kind[each]] > 1]
        if share > 0 and not size and others:
            smallest = min(others, key=lambda group: sizes[group])
            part_of[smallest], left[kind[smallest]] = part, left[kind[smallest]] - 1
    return [part_of.get(group, 0) for group in groups]


def split_by_group(
    records: Sequence[Any],
    groups: Sequence[str],
    shares: Mapping[str, float],
    seed: int,
    group_name: str,
    categories: Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """ "train" and the parts of a share above 0 by name, no group on two sides; see hold_out()."""
    names = [name for name, share in shares.items() if share > 0]
    parts = hold_out(groups, [shares[name] for name in names], seed, categories)
    for part, name in enumerate(names, start=1):
        if part in parts:
            continue
        text = f"{records[0].where}: no kind of record has two of different {group_name}"
        if name == "test":  # Of which certificates are.
            raise DataError(f"{text}, so none can be test. Set test_fraction to 0, or a file.")
        rank_zero_warn(f"{text}, so none is held out for {name}.")
    return {
        name: [record for record, own in zip(records, parts, strict=True) if own == part]
        for part, name in enumerate(["train", *names])
        if part in parts
    }


def prompt_groups(records: Sequence[Any]) -> list[str]:
    """For each record the first prompt of its unit; where no two are alike, its own."""
    first: dict[str, str] = {}
    return [first.setdefault(record.unit, record.prompt) for record in records]


def side_of_held_out(records: Sequence[Any], shares: Mapping[str, float], seed: int) -> list[str]:
    """For each held-out record "val" or "test", in proportion to the shares, prompts whole."""
    val, test = shares["val"], shares["test"]
    if not val or not test:
        return ["test" if test else "val"] * len(records)
    share = round(test / (val + test), 9)  # 0.15 / (0.05 + 0.15) is a little less than 0.75.
    categories = [record.category for record in records]
    parts = hold_out(prompt_groups(records), [share], seed, categories)
    return ["test" if part else "val" for part in parts]


def warn_of_shared(splits: Mapping[str, Sequence[Any]], sources: Mapping[str, str]) -> None:
    """Says of each two splits how many records of the later have a prompt of the earlier."""
    units = {split: [record.unit for record in records] for split, records in splits.items()}
    for first, second in combinations(units, 2):
        known = set(units[first])
        if shared := sum(unit in known for unit in units[second]):
            rank_zero_warn(
                f"{sources[second]}: {shared:,} of {len(units[second]):,} prompts are in "
                f"{sources[first]} too, so results on it flatter. Take them out of one."
            )
