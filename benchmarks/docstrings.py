"""Makes the re-ranker's ``docstrings.jsonl``: what the standard library of one Python documents.

    python benchmarks/docstrings.py > tasks/reranker/docstrings/docstrings.jsonl

Run by hand, and only to replace the shipped file; README.md beside that says by which Python the
shipped one was made. Source files are read with ``ast``, never imported, and the order in which a
file system lists them does not matter.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

EXCLUDED = frozenset(
    {
        "_vendor",
        "conftest",
        "distutils",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "test",
    }
    | {"testing", "tests", "this", "tkinter", "turtle", "turtledemo"}
)
"""Modules that hold tests, or that not every installation of a Python version has."""

QUERY_WORDS = (4, 30)
PASSAGE_WORDS = (8, 100)
RUN = 5
"""A body half of whose runs of five words stood in earlier bodies is a repetition."""
COMMON = frozenset(
    {
        "retur",
        "this",
        "that",
        "with",
        "from",
        "when",
        "given",
        "will",
        "which",
        "been",
        "into",
    }
    | {"does", "have"}
)
"""Stems of words that say nothing of a text's subject."""


class Docstring(NamedTuple):
    """A documented function or class: where it stands, its summary and the text after it."""

    module: str
    name: str
    query: str
    body: str


def docstrings(
    root: Path, names: Iterable[str] = sys.stdlib_module_names
) -> list[Docstring]:
    """Every usable docstring of the modules below ``root``, in the order of modules and lines.

    Left out are those whose summary recurs, and those whose body has stood, or nearly stood,
    before: records must be distinct, and nothing of one record may stand in another.
    """
    entries = [
        entry
        for module, path in _modules(root, names)
        for entry in _documented(module, path.read_bytes())
    ]
    queries = Counter(" ".join(_words(entry.query)) for entry in entries)
    kept = []
    seen: set[tuple[str, ...]] = set()
    for entry in entries:
        words = _words(entry.body)
        runs = {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
        known = len(runs & seen)
        seen |= runs
        if queries[" ".join(_words(entry.query))] == 1 and 2 * known < len(runs):
            kept.append(entry)
    return kept


def _modules(root: Path, names: Iterable[str]) -> list[tuple[str, Path]]:
    """(dotted name, source file) of the modules below a folder, by name; nothing is imported."""
    found = []
    for name in set(names) - EXCLUDED:
        if (root / f"{name}.py").is_file():
            found.append((name, root / f"{name}.py"))
        for path in (root / name).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if EXCLUDED.isdisjoint(parts) and not any(
                part.startswith("test_") for part in parts
            ):
                found.append(
                    (".".join(part for part in parts if part != "__init__"), path)
                )
    return sorted(found)


def _documented(module: str, source: bytes) -> Iterator[Docstring]:
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
            if not isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            ):
                continue
            name = prefix + node.name
            if isinstance(node, ast.ClassDef):
                pending.append((f"{name}.", node))
            summary, body = split(ast.get_docstring(node) or "")
            if _usable(summary, body):
                yield Docstring(module, name, summary, body)


def split(docstring: str) -> tuple[str, str]:
    """A docstring's summary and its body, each on one line, without mark-up, rules and examples.

    The summary is the first line, or the first paragraph where that line does not end a sentence.
    The body is cut at 100 words, at the end of a paragraph if eight words remain.
    """
    lines = docstring.strip().splitlines() or [""]
    while (
        not lines[0].endswith((".", "!", "?")) and len(lines) > 1 and lines[1].strip()
    ):
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


def main() -> None:
    for entry in docstrings(Path(sysconfig.get_path("stdlib"))):
        print(json.dumps(entry._asdict(), ensure_ascii=False))


if __name__ == "__main__":
    main()
