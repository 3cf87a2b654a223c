"""Names of fields that say nothing of what a model reads or writes: ids, sources, measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_HARMLESS = frozenset(
    "id idx index uid uuid guid key hash sha256 md5 number no name source src origin dataset"
    " dataset_name subset split config task_name type kind label category categories domain"
    " topic topics subject subjects field area tags tag keywords skill skills difficulty level"
    " grade quality annotator annotators annotator_id author authors user user_id worker model"
    " models generator engine provider url urls link links lang language languages locale license"
    " licence version date time timestamp created created_at updated_at year metadata meta info"
    " extra extra_info other stats score scores rating ratings feedback likes comment comments note"
    " notes focus behaviour behavior finish_reason stop_reason usage logprobs tokens token_count"
    " num_tokens length lengths embedding embeddings cluster fingerprint filename file path repo"
    " citation"
    " references_id conversation_id prompt_id message_id parent_id request_id session_id".split()
)
_LABELS = frozenset({"task"})
"""Harmless where it is a label, of one word; else it may say what to do."""
_ENDINGS = re.compile(
    r"(^|_)(id|ids|idx|index|uuid|hash|sha\d+|url|source|model|name|lang|language|license|version"
    r"|date|time|at|type|category|tokens|count|len|length|score|scores|rating|ratings|label|labels"
    r"|metadata|meta)$"
)
_NUMBER = re.compile(r"[-+]?[\d.,]*\d(e[-+]?\d+)?|true|false|null|nan", re.IGNORECASE)
_BEGINNINGS = re.compile(
    r"^(id|num|n|orig|original|source|annotator|generation|index_level)_"
)


def is_harmless(name: str, value: Any = None) -> bool:
    """Whether a field of this name is known to say nothing of prompt and answer."""
    plain = name.lower().strip("_").replace("-", "_")
    if plain in _LABELS:
        return isinstance(value, str) and len(value.split()) == 1
    return plain in _HARMLESS or bool(
        _ENDINGS.search(plain) or _BEGINNINGS.search(plain)
    )


def texts_in(value: Any) -> Iterator[str]:
    """The texts in a value, without the names of its fields, and without numbers of a table."""
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value.strip()):
            yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from texts_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from texts_in(entry)
