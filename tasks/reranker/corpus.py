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


def docstring_records(negatives: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records of the schema of ``microsoft/ms_marco``; "query_type" is the top-level module.

    Modules with fewer ``negatives`` are left out; ``seed`` draws them.
    """
    with DOCSTRINGS.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    records = []
    for module, documented in groupby(entries, key=lambda entry: entry["module"]):
        of_it, group = list(documented), module.partition(".")[0]
        for entry in of_it if len(of_it) > negatives else ():
            query_id = f"{module}:{entry['name']}"
            key = hashlib.sha256(f"{seed} {query_id}".encode()).digest()
            others = [other["body"] for other in of_it if other is not entry]
            texts = [entry["body"], *random.Random(key).sample(others, negatives)]
            passages = {"is_selected": [1] + [0] * negatives, "passage_text": texts}
            record = {"query_id": query_id, "query": entry["query"], "query_type": group}
            records.append(record | {"passages": passages})
    return records
