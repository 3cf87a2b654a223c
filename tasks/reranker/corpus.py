"""The embedded corpus: re-ranking records made of docstrings that ship with this package.

A docstring of Python's standard library becomes one record:

    query      "Read and return a line from the stream."                  the summary
    positive   "If limit is specified, at most limit bytes will be read." the body
    negatives  "If the argument is omitted, None, or negative, data ..."  other bodies of the
               "When the optional zip64 arg is None rather than ..." ...  same module

so that it takes more than knowing the subject to tell them apart. No two queries are alike. Source
and licence of the docstrings are in the folder ``docstrings``, with the script that collected them.
"""

from __future__ import annotations

import hashlib
import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

DOCSTRINGS = Path(__file__).parent / "docstrings" / "docstrings.jsonl"


def docstring_records(negatives: int, seed: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """(top-level module, record of the schema of ``microsoft/ms_marco``) pairs.

    Modules with fewer ``negatives`` are left out; ``seed`` draws them.
    """
    with DOCSTRINGS.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    records = []
    for module, documented in groupby(entries, key=lambda entry: entry["module"]):
        bodies = [(entry["name"], entry["query"], entry["body"]) for entry in documented]
        if len(bodies) <= negatives:
            continue
        for position, (name, query, body) in enumerate(bodies):
            query_id = f"{module}:{name}"
            key = hashlib.sha256(f"{seed} {query_id}".encode()).digest()
            others = [other for *_, other in bodies[:position] + bodies[position + 1 :]]
            texts = [body, *random.Random(key).sample(others, negatives)]
            passages = {"is_selected": [1] + [0] * negatives, "passage_text": texts}
            group = module.partition(".")[0]
            record = {"query_id": query_id, "query": query, "query_type": group}
            records.append((group, record | {"passages": passages}))
    return records
