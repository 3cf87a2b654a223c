"""A line is read once: what ruff has no rule for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 60
SAY_NOTHING = {"found", "each", "given", "own", "told", "said"}
"""Names that say how a value came, and not what it is."""
OF_LIBRARIES = {
    "bisect_left",
    "fill_",
    "inference_mode",
    "requires_grad_",
    "set_materialize_grads",
    "get",
    "getattr",
}
"""Whose positional True or False nobody misreads."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def slips(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line of each slip, and what it is."""
    tuples = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for argument in node.args:
                starred = argument.value if isinstance(argument, ast.Starred) else None
                known = isinstance(starred, ast.Name) and starred.id in tuples
                if known or isinstance(starred, (ast.Tuple, ast.IfExp)):
                    yield (
                        node.lineno,
                        "a starred tuple of known length: name the arguments",
                    )
            booleans = [
                a
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, bool)
            ]
            if booleans and called(node) not in OF_LIBRARIES:
                yield node.lineno, "a positional True or False: name the argument"
        if isinstance(node, COMPREHENSIONS):
            inner = [
                n
                for n in ast.walk(node)
                if isinstance(n, COMPREHENSIONS) and n is not node
            ]
            if inner or len(node.generators) > 1:
                yield node.lineno, "a comprehension over two things: write a loop"
            if any(isinstance(n, ast.NamedExpr) for n in ast.walk(node)):
                yield node.lineno, ":= in a comprehension: write a loop"
        long = isinstance(node, ast.BoolOp) and len(node.values) > 2
        if long and any(isinstance(n, ast.NamedExpr) for n in ast.walk(node)):
            yield node.lineno, ":= in a condition of three parts: assign before it"
        name = named_by(node)
        if name in SAY_NOTHING:
            yield node.lineno, f"{name!r} says how a value came: say what it is"


def named_by(node: ast.AST) -> str | None:
    """The variable or the argument that a node gives a name to."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    function = call.func
    return getattr(function, "attr", None) or getattr(function, "id", "")


def long_functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LONGEST:
                yield node.lineno, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("folder", ["callbacks", "pl_pointwise", "tasks"])
def test_a_line_is_read_once(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        here = [*long_functions(tree), *slips(tree)]
        wrong += [f"{name}:{line}: {slip}" for line, slip in here]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "slip"),
    [
        ("pair = a, b\nf(x, *pair)", "starred"),
        ("f(*(a if c else b))", "starred"),
        ("f(x, True)", "positional"),
        ("[[g(y) for y in x] for x in xs]", "two things"),
        ("{y: x for x in xs for y in x}", "two things"),
        ("if (a := b) and c and d:\n    pass", "three parts"),
        ("for each in xs:\n    pass", "what it is"),
        ("def f(given):\n    pass", "what it is"),
    ],
)
def test_a_slip_is_seen(code: str, slip: str) -> None:
    (line,) = slips(ast.parse(code))
    assert slip in line[1]


def test_what_reads_well_is_no_slip() -> None:
    code = "f(*rows, strict=True)\nif a := b:\n    x.requires_grad_(False)\n[g(x) for x in xs]"
    assert not list(slips(ast.parse(code)))


def test_a_folder_is_seen_at_a_glance() -> None:
    """Of the package no folder has more than 22 files beside its ``__init__``."""
    for folder in ("callbacks", "pl_pointwise", "tasks"):
        for path in (ROOT / folder).rglob("__init__.py"):
            files = [file for file in path.parent.glob("*.py") if file != path]
            assert len(files) <= 22, path.parent
