"""The embedded corpus: re-ranking records made of text that every installation has.

A docstring of the standard library, or of a package this project depends on, becomes one record:

    query      "Read and return a line from the stream."                  the summary
    positive   "If limit is specified, at most limit bytes will be read." the body
    negatives  "If the argument is omitted, None, or negative, data ..."  other bodies of the
               "When the optional zip64 arg is None rather than ..." ...  same module

so that it takes more than knowing the subject to tell them apart. Source files are read with
``ast``, never imported. The records are a function of the installed versions alone, not of the
order in which a file system lists its files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import random
import re
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

STANDARD_LIBRARY = ""
PACKAGES = (
    STANDARD_LIBRARY,
    "lightning",
    "torch.nn",
    "torch.optim",
    "torch.autograd",
    "torch.distributions",
    "torch.utils",
    "torch.distributed",
)
"""Where docstrings come from; of texts that recur, the earliest package keeps its own."""

EXCLUDED = frozenset(
    {"_vendor", "conftest", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test"}
    | {"testing", "tests", "this", "tkinter", "turtle", "turtledemo"}
)
"""Modules that hold tests, or that not every installation of a Python version has."""

QUERY_WORDS = (4, 30)
PASSAGE_WORDS = (8, 100)
RUN = 5
"""A body half of whose runs of five words stood in earlier bodies is a repetition."""
COMMON = frozenset(
    {"retur", "this", "that", "with", "from", "when", "given", "will", "which", "been", "into"}
    | {"does", "have"}
)
"""Stems of words that say nothing of a text's subject."""


@dataclass(frozen=True)
class Docstring:
    """A documented function or class: what nothing may leak out of, where it stands, its text."""

    group: str
    module: str
    name: str
    summary: str
    body: str


def docstring_rows(
    negatives: int, enough: int | None = None, seed: int = 0
) -> list[tuple[str, dict[str, Any]]]:
    """The corpus as (group, row) pairs, rows of the schema of ``microsoft/ms_marco``.

    Texts of one group, a top-level module of the standard library or one of ``PACKAGES``, belong
    on one side of a split.

    Args:
        negatives: bodies of the same module in each row, besides the positive. Modules with fewer
            are left out.
        enough: the number of rows after which no further package is read; None reads them all.
        seed: which bodies.
    """
    rows: list[tuple[str, dict[str, Any]]] = []
    for count in range(1, len(PACKAGES) + 1):
        rows = _rows(documents(PACKAGES[:count]), negatives, seed)
        if enough is not None and len(rows) >= enough:
            break
    return rows


def _rows(
    entries: Iterable[Docstring], negatives: int, seed: int
) -> list[tuple[str, dict[str, Any]]]:
    by_module: dict[str, list[Docstring]] = defaultdict(list)
    for entry in entries:
        by_module[entry.module].append(entry)
    rows = []
    for module, documented in by_module.items():
        if len(documented) <= negatives:
            continue
        for position, entry in enumerate(documented):
            query_id = f"{module}:{entry.name}"
            key = hashlib.sha256(f"{seed} {query_id}".encode()).digest()
            others = [other.body for other in documented[:position] + documented[position + 1 :]]
            texts = [entry.body, *random.Random(key).sample(others, negatives)]
            passages = {"is_selected": [1] + [0] * negatives, "passage_text": texts}
            row = {"query_id": query_id, "query": entry.summary, "passages": passages}
            rows.append((entry.group, row))
    return rows


def documents(packages: Iterable[str] = PACKAGES) -> list[Docstring]:
    """Every usable docstring of the packages, in the order of packages, modules and lines.

    Left out are those whose summary recurs, in their package or an earlier one, and those whose
    body has stood, or nearly stood, before.
    """
    kept = []
    asked: set[str] = set()
    seen: set[tuple[str, ...]] = set()
    for package in packages:
        entries = _package(package)
        questions = Counter(" ".join(_words(entry.summary)) for entry in entries)
        for entry in entries:
            question, words = " ".join(_words(entry.summary)), _words(entry.body)
            runs = {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
            known = len(runs & seen)
            seen |= runs
            if questions[question] == 1 and question not in asked and 2 * known < len(runs):
                kept.append(entry)
        asked |= questions.keys()
    return kept


@cache
def _package(package: str) -> tuple[Docstring, ...]:
    return tuple(
        entry
        for module, path in _modules(package)
        for entry in _documented(package or module.partition(".")[0], module, path.read_bytes())
    )


def _modules(package: str) -> list[tuple[str, Path]]:
    """(dotted name, source file) of a package's modules, by name; nothing is imported."""
    if package == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        names = sorted(sys.stdlib_module_names - EXCLUDED)
        folders = [_files(name, root / name) for name in names if (root / name).is_dir()]
        single = [(name, root / f"{name}.py") for name in names if (root / f"{name}.py").is_file()]
        return sorted([*single, *(file for files in folders for file in files)])
    top, *rest = package.split(".")
    spec = importlib.util.find_spec(top)  # a top-level package is found without importing it
    if spec is None or spec.origin is None:
        return []
    return _files(package, Path(spec.origin).parent.joinpath(*rest))


def _files(name: str, folder: Path) -> list[tuple[str, Path]]:
    found = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        if EXCLUDED.isdisjoint(parts) and not any(part.startswith("test_") for part in parts):
            found.append((".".join((name, *(p for p in parts if p != "__init__"))), path))
    return sorted(found)


def _documented(group: str, module: str, source: bytes) -> Iterator[Docstring]:
    """What a source file documents, in its order; nothing for a file that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    for prefix, parent in pending:
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            name = prefix + node.name
            if isinstance(node, ast.ClassDef):
                pending.append((f"{name}.", node))
            summary, body = split(ast.get_docstring(node) or "")
            if _usable(summary, body):
                yield Docstring(group, module, name, summary, body)


def split(docstring: str) -> tuple[str, str]:
    """A docstring's summary and its body, each on one line, without mark-up, rules and examples.

    The summary is the first line, or the first paragraph where that line does not end a sentence.
    The body is cut at 100 words, at the end of a paragraph if eight words remain.
    """
    lines = docstring.strip().splitlines() or [""]
    while not lines[0].endswith((".", "!", "?")) and len(lines) > 1 and lines[1].strip():
        lines[:2] = [f"{lines[0].strip()} {lines[1].strip()}"]
    paragraphs: list[list[str]] = [[]]
    example = False
    for line in map(str.strip, lines[1:]):
        example = line.startswith(">>>") or (example and line != "")
        if re.fullmatch(r"\W*", line):  # empty, or a rule under a heading
            paragraphs.append([])
        elif not example and not line.startswith(".. "):
            paragraphs[-1].append(line)
    words: list[str] = []
    for paragraph in paragraphs:
        more = _plain(" ".join(paragraph)).split()
        if len(words) + len(more) > PASSAGE_WORDS[1] and len(words) >= PASSAGE_WORDS[0]:
            break
        words += more
    return _plain(lines[0]), " ".join(words[: PASSAGE_WORDS[1]])


def _plain(text: str) -> str:
    """The text without Sphinx roles and back-quotes, white space collapsed."""
    text = re.sub(r":[a-z:]+:`[~!]?([^`<]*?)(\s*<[^`>]*>)?`", r"\1", text)
    return " ".join(text.replace("`", "").split())


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _usable(summary: str, body: str) -> bool:
    """Whether the two are a question and its answer: of one subject, and not a repetition."""
    query, passage = _words(summary), _words(body)
    return (
        QUERY_WORDS[0] <= len(query) <= QUERY_WORDS[1]
        and len(passage) >= PASSAGE_WORDS[0]
        and not re.match(r"[\w.]+\(|\W", summary)  # a signature, a field, a directive
        and {"deprecated", "todo", "fixme"}.isdisjoint(query + passage)
        and " ".join(query) not in " ".join(passage)
        and not _subjects(query).isdisjoint(_subjects(passage))
    )


def _subjects(words: Iterable[str]) -> set[str]:
    """Stems, crudely, of the words that tell what a text is about."""
    return {word[:5] for word in words if len(word) > 3} - COMMON
