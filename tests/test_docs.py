"""The documentation runs and hangs together: code, ``>>>`` lines, links, navigation."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

import pl_pointwise.callbacks
import pl_pointwise.tasks
from pl_pointwise.command_line.configs import packaged_comparisons, packaged_configs
from tests.pl_pointwise.table import FORMULATIONS

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [
    *(
        ROOT / f"{name}.md"
        for name in ("README", "CHANGELOG", "CONTRIBUTING", "RELEASING")
    ),
    ROOT / "benchmarks/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
PUBLIC_PACKAGES = [
    importlib.import_module(f"pl_pointwise{name}")
    for name in (
        "",
        ".tasks",
        ".callbacks",
        ".requirements",
        ".tasks.digits",
        ".tasks.family",
    )
]
MODULES = [
    ("" if top == "pl_pointwise" or top == "benchmarks" else "pl_pointwise.")
    + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for top in ("pl_pointwise", "callbacks", "tasks", "benchmarks")
    for path in sorted((ROOT / top).rglob("*.py"))
    if "\n    >>> " in path.read_text(encoding="utf-8")
]


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_doctests_of_the_page_pass(page: Path) -> None:
    failures, _ = doctest.testfile(str(page), module_relative=False)
    assert failures == 0


@pytest.mark.parametrize("module", MODULES)
def test_doctests_of_the_module_pass(module: str) -> None:
    failures, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failures == 0


def test_the_task_of_the_readme_trains(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    found: dict = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), found)
    module = found["module"]
    multipliers = module.multipliers["fit"][:, 0]
    assert multipliers.shape == (40,)
    assert 0 < (multipliers > 0.01).sum() < 30
    rows = found["Points"](batch_size=40)
    rows.setup("fit")
    batch = rows.collate(rows.datasets["train"])
    residuals = (module(batch) - batch["y"]).abs()
    assert residuals.max() < 0.105
    assert "λ of every sample: (40, 1)" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_configurations_named_on_the_page_exist(page: Path) -> None:
    for option, name in re.findall(
        r"--(config|methods|rows) ([a-z][\w/]*)(?![\w/.])", page.read_text()
    ):
        assert name in (
            packaged_configs() if option == "config" else packaged_comparisons()
        )


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_yaml_and_json_blocks_of_the_page_parse(page: Path) -> None:
    for kind, block in re.findall(
        r"(?ms)^```(yaml|jsonl?)\n(.*?)^```", page.read_text("utf-8")
    ):
        if kind == "yaml":
            assert isinstance(yaml.safe_load(block), (dict, list))
        else:  # A record a line, as a file of them has it.
            assert all(
                isinstance(json.loads(line), dict) for line in block.splitlines()
            )


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if target.startswith("https://"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links {link}: no such file."
        if anchor:
            assert anchor in anchors(file), (
                f"{page.name} links {link}: {file.name} has no such heading. Put the link right, "
                "or the heading back."
            )


def anchors(page: Path) -> set[str]:
    """Of the headings, as repositories' web views and the site both form them."""
    text = re.sub(r"(?s)```.*?```", "", page.read_text())
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def test_the_index_for_programs_is_that_of_the_pages() -> None:
    """`python docs/agents.py` writes llms.txt and AGENTS.md."""
    for name, text in runpy.run_path(str(ROOT / "docs/agents.py"))["FILES"].items():
        assert (ROOT / name).read_text(encoding="utf-8") == text(), (
            f"{name} is not what the pages say: run python docs/agents.py, and commit it."
        )


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    """A page that no table of contents names is built, and found by nobody."""
    index = ROOT / "docs/index.md"
    tables = re.findall(r"(?s)```{toctree}\n(.*?)```", index.read_text())
    entries = [
        line
        for table in tables
        for line in table.splitlines()
        if re.match(r"[^:\s]", line)
    ]
    listed = [(index.parent / entry).resolve() for entry in entries]
    expected = [page.with_suffix("") for page in (*PAGES, *NOTEBOOKS)]
    expected += [ROOT / "docs/api/index"]
    expected.remove(index.with_suffix(""))
    wrong = sorted({*listed} ^ {*expected})
    assert sorted(listed) == sorted(expected), (
        f"docs/index.md: name each page once in its navigation, and none that is not there: {wrong}"
    )


def pages_of_the_reference() -> list[str]:
    """What docs/api has a page of, by the name that it is imported by."""
    # Their lists are written by docs/conf.py.
    whole = (pl_pointwise, pl_pointwise.callbacks)
    names = [
        f"{package.__name__}.{name}" for package in whole for name in package.__all__
    ]
    for file in ("modules", "tasks"):
        package = ""
        for line in (ROOT / f"docs/api/{file}.rst").read_text("utf-8").splitlines():
            if found := re.match(r"\.\. currentmodule:: (\S+)", line):
                package = found[1]
            elif package and (found := re.match(r"   ([A-Za-z]\S*)$", line)):
                names.append(f"{package}.{found[1]}")
    return names


def test_the_reference_has_a_page_of_every_public_name_and_of_no_module() -> None:
    pages = pages_of_the_reference()
    assert len(pages) == len({*pages})
    for package in PUBLIC_PACKAGES:
        names = {f"{package.__name__}.{name}" for name in package.__all__}
        assert names <= {*pages}, (
            f"docs/api/*.rst: name {', '.join(sorted(names - {*pages}))}."
        )
    for name in pages:
        module, _, last = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), last, None)), (
            f"docs/api/*.rst lists {name}, which is not there: a public name stays, or is another "
            "one there, on all pages, and in CHANGELOG.md."
        )
    for file in (ROOT / "docs").rglob("*.rst"):
        assert not re.search(r"automodule|:recursive:", file.read_text("utf-8")), file


@pytest.mark.parametrize("name", pl_pointwise.callbacks.__all__)
def test_a_callback_is_in_the_table_of_its_page(name: str) -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text("utf-8")
    assert re.search(rf"^\| \[?`{name}`", page, re.MULTILINE), (
        f"docs/callbacks.md: a row of {name} in the table of all callbacks."
    )


PSI = [
    name
    for name in pl_pointwise.__all__
    if hasattr(getattr(pl_pointwise, name), "lagrangian")
]


@pytest.mark.parametrize("name", sorted({*PSI} - {"Formulation"}))
def test_a_formulation_is_on_its_page_and_among_those_that_are_held_against_it(
    name: str,
) -> None:
    page = (ROOT / "docs" / "formulations.md").read_text("utf-8")
    assert re.search(rf"^\| `{name}\b", page, re.MULTILINE)
    assert name in {type(each).__name__ for each in FORMULATIONS.values()}


@pytest.mark.parametrize("name", pl_pointwise.__all__)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(pl_pointwise, name).__doc__ or "")


PUBLIC_CLASSES = {
    name: found
    for name in pages_of_the_reference()
    for module, _, last in (name.rpartition("."),)
    # What is not there fails below, with the remedy.
    if isinstance(found := getattr(importlib.import_module(module), last, None), type)
}


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_every_argument_of_a_public_class_is_described(name: str) -> None:
    """In the docstring, or beside a dataclass's field, where the page shows it too."""
    kind = PUBLIC_CLASSES[name]
    if issubclass(kind, Exception):
        return
    described, source = kind.__doc__ or "", inspect.getsource(kind)
    for argument, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            beside = rf'    {argument}: .*(#: .|\n    """.)'
            field = rf"(?m)^({beside}|    #: .*\n    {argument}: )"
            assert re.search(rf"\b{argument}\b", described) or re.search(
                field, source
            ), argument
