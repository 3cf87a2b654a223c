"""What a verdict speaks of it is tied to: bounds, code, rows, every file of the folder."""

from __future__ import annotations

import json
import logging
import shutil
import stat
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise.compare import command
from pl_pointwise.errors import DataError
from pl_pointwise.export.loading import certificate_in, required_of
from pl_pointwise.identity.files import digest_now
from pl_pointwise.requirements import RequirementError
from pl_pointwise.requirements.check import check_models
from pl_pointwise.requirements.monitor import monitor
from pl_pointwise.requirements.samples import known_among, records_not_known, units_in
from pl_pointwise.requirements.source import Source
from pl_pointwise.requirements.uses import check_unused, remember_use, uses_of
from tests.pl_pointwise.requirements.test_identity import (
    CONFIG,
    NEW,
    REQUIREMENT,
    TASK,
    compare,
    make,
    own,
    refused,
)


@pytest.fixture(scope="module", name="done")
def comparison_with_its_answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("done")
    make(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PL_POINTWISE_USES", str(folder / "uses"))
        patch.setattr(command, "draw_plots", lambda *_: None)
        compare("--require", REQUIREMENT)
    return folder


@pytest.fixture(name="here")
def a_copy_of_it(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(done, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)
    monkeypatch.setenv("PL_POINTWISE_USES", str(tmp_path / "copy/uses"))
    return tmp_path / "copy"


# Files of the folder -----------------------------------------------------------------------------


def test_the_certificate_lists_every_file(here: Path) -> None:
    model = here / "out/model"
    files = certificate_in(model)["files"]
    there = {p.relative_to(model).as_posix() for p in model.rglob("*") if p.is_file()}
    assert there - {*files} == {"README.md", "certificate/certificate.json"}


def test_what_the_bounds_are_built_from_is_listed(here: Path) -> None:
    """They could be moved under a certificate: 44 % violated became none."""
    config = here / "out/model/certificate/config.yaml"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(DataError, match=r"certificate/config\.yaml differs"):
        monitor(here / "out/model", NEW, own(here / "out/model"), here / "state.json")


def test_a_certificate_of_an_earlier_version_holds(here: Path) -> None:
    """It listed no config.yaml, and had no bounds, base or code on record."""
    path = here / "out/model/certificate/certificate.json"
    found = json.loads(path.read_text())
    del found["files"]["certificate/config.yaml"]
    for name in ("bounds", "base", "code", "data", "models", "tested"):
        del found[name]
    path.write_text(json.dumps(found))
    [check] = monitor(
        here / "out/model", NEW, own(here / "out/model"), here / "state.json"
    )
    assert (check.n, check.verdict) == (90, "believable")
    compare("--require", REQUIREMENT)  # And its answer is repeated.


@pytest.mark.parametrize(
    "name",
    [
        *(
            "special_tokens_map.json",
            "additional_chat_templates/tool_use.jinja",
            "vocab.txt",
        ),
        *(
            "certificate/more.yaml",
            "tokenizer.model",
            "model.safetensors.index.json",
            "x.py",
        ),
    ],
)
def test_a_file_that_is_added_is_named(here: Path, name: str) -> None:
    model = here / "out/model"
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("{}")
    assert f"{name} differs: it was not there" in required_of(model)
    with pytest.raises(DataError, match="it was not there"):
        check_models(model, "start", NEW, configs=own(model))


def test_texts_for_people_and_hidden_files_may_be_added(here: Path) -> None:
    model = here / "out/model"
    (model / "MORE.md").write_text("a text")
    (model / ".gitattributes").write_text("of the hub")
    (model / ".cache").mkdir()
    (model / ".cache/lock").touch()
    state = model / "certificate/own-state.json"  # Which the user names.
    for _ in range(2):
        monitor(model, NEW, own(model), state)
    assert "own-state.json differs" in required_of(model)  # Named, as it is not listed.
    state.unlink()
    assert "its certificate.json says, with 95 %" in required_of(model)


def test_a_missing_permission_is_told_as_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as forgery."""
    model, opened = here / "out/model", Path.open

    def forbidden(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    def not_read(path: Any) -> str | None:
        return None if Path(path).name == "model.safetensors" else digest_now(path)

    monkeypatch.setattr("pl_pointwise.identity.files.digest_now", not_read)
    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(PermissionError, match="Permission denied"):
        certificate_in(model)


def test_weights_have_the_mode_of_the_other_files(here: Path) -> None:
    model = here / "out/model"
    modes = {stat.S_IMODE(p.stat().st_mode) for p in model.rglob("*") if p.is_file()}
    assert len({mode & 0o444 for mode in modes}) == 1


def test_a_configuration_of_other_bounds_is_refused(here: Path) -> None:
    model, config = here / "out/model", here / "mine.yaml"
    certificate = model / "certificate/certificate.json"
    found = json.loads(certificate.read_text())
    found["bounds"]["near"] = "Constraint(at_most=9.0, at_least=None, equals=None)"
    certificate.write_text(json.dumps(found))
    shutil.copy(model / "certificate/config.yaml", config)
    with pytest.raises(RequirementError, match="was certified by the bounds"):
        monitor(model, NEW, [str(config)], here / "state.json")


def test_arguments_that_the_checkpoint_was_not_trained_with_are_refused(
    here: Path,
) -> None:
    """What a task counts may hang on any of them; a predecessor may be of another method."""
    model, config = here / "out/model", here / "mine.yaml"
    text = (model / "certificate/config.yaml").read_text()
    penalty = "{class_path: pl_pointwise.Penalty, init_args: {weight: 7.0}}"
    config.write_text(text.replace("formulation: null", f"formulation: {penalty}"))
    assert penalty in config.read_text()
    with pytest.raises(
        RequirementError, match=r"was certified with --model\.formulation"
    ):
        monitor(model, NEW, [str(config)], here / "state.json")
    shutil.copytree(model, here / "older")
    path = here / "older/certificate/model.ckpt"
    state = torch.load(path, weights_only=True)
    state["hyper_parameters"]["formulation"] = {"class_path": "pl_pointwise.Penalty"}
    torch.save(state, path)
    certificate = here / "older/certificate/certificate.json"
    found = json.loads(certificate.read_text())
    found["files"]["certificate/model.ckpt"] = digest_now(path)
    certificate.write_text(json.dumps(found))
    assert check_models(model, "older", NEW, configs=own(model))


def test_another_base_is_refused(here: Path) -> None:
    model = here / "out/model"
    certificate = model / "certificate/certificate.json"
    found = json.loads(certificate.read_text()) | {"base": {"./base": "folder 123"}}
    certificate.write_text(json.dumps(found))
    with pytest.raises(RequirementError, match=r"its base model \./base is not here"):
        monitor(model, NEW, own(model), here / "state.json")


def test_a_model_of_other_test_data_is_said_before_training(here: Path) -> None:
    certificate = here / "out/model/certificate/certificate.json"
    found = json.loads(certificate.read_text())
    found["data"]["test data"] = "of another file"
    certificate.write_text(json.dumps(found))
    shutil.rmtree(here / "out/runs")
    with pytest.raises(SystemExit):
        compare("--require", REQUIREMENT)
    assert not list(here.glob("out/runs/*/*/result.json"))


# Code of one's own -------------------------------------------------------------------------------


OWN = f"""
from {TASK} import LinearModule
class OwnModule(LinearModule):
    def __init__(self, formulation: object = None) -> None:
        super().__init__(None)
    def constraint_values(self, outputs, batch):
        found = super().constraint_values(outputs, batch)
        return {{name: values + SHIFT for name, values in found.items()}}
"""


def test_a_verdict_is_of_the_code_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    """constraint_values + 5, the same command: "finished before", the old answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)
    make(tmp_path)
    (tmp_path / "base.yaml").write_text(
        CONFIG.replace(f"{TASK}.LinearModule", "own_here.OwnModule")
    )

    def code(shift: float) -> None:
        (tmp_path / "own_here.py").write_text(f"SHIFT = {shift}\n{OWN}")
        sys.modules.pop("own_here", None)

    code(0.0)
    compare("--require", REQUIREMENT)
    assert "was shown to meet" in capsys.readouterr().out
    certificate = json.loads(
        (tmp_path / "out/model/certificate/certificate.json").read_text()
    )
    assert certificate["code"]
    code(5.0)
    said = refused(capsys, "--require", REQUIREMENT)
    assert "and code, in" in said or "with other code" in said
    said = refused(capsys, "--require", REQUIREMENT, output="another")
    assert "and code, in" in said or "with other code" in said
    with caplog.at_level(logging.WARNING):
        monitor("out/model", NEW, own(Path("out/model")), tmp_path / "state.json")
    assert "with other source files of your own task" in caplog.text
    compare(output="plain")
    compare(output="plain")
    assert capsys.readouterr().out.count("(finished before)") == 2
    code(6.0)
    compare(output="plain")
    assert "(finished before)" not in capsys.readouterr().out


def test_what_a_plain_comparison_spends_is_said_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)
    make(tmp_path)
    compare()
    said = capsys.readouterr().out
    assert said.startswith("Without --require the tables show the test data")
    compare()
    # Nothing is left to be shown.
    assert "Without --require" not in capsys.readouterr().out


def test_a_requirement_given_twice_is_one(here: Path) -> None:
    # The same use.
    compare("--require", REQUIREMENT, "--require", "near:  violated <= .1")


# Rows --------------------------------------------------------------------------------------------


class Named(list[dict[str, Any]]):
    units: list[str]


def named(names: list[str], texts: list[str], **more: Any) -> Named:
    rows = Named(
        {"text": t, "unit": n, "n": 1.5, **more}
        for n, t in zip(names, texts, strict=True)
    )
    rows.units = names
    return rows


def table(rows: Any, name: str = "test") -> Any:
    index = torch.arange(len(rows))
    return Source(name, rows).lines("constraint", "near", index, torch.zeros(len(rows)))


TEXTS = ["What is it?", "Who was he?", "caf\u00e9", "Why?"]


@pytest.mark.parametrize("rename", [lambda k: f"c{k}", lambda k: f"{k:032x}"])
def test_rows_under_other_names_are_the_same_rows(rename: Any) -> None:
    before = table(named([f"a{k}" for k in range(4)], TEXTS))
    again = table(named([rename(k) for k in range(4)], TEXTS))
    new = table(named(["a9", "a8"], ["other", "another"]))
    marks = {*before["unit"], *before["content"]}
    assert records_not_known(again, marks)[1] == 4
    assert records_not_known(new, marks)[1] == 0
    assert len(known_among(units_in(again), marks)) == 4
    without = [{"text": text, "n": 1.5} for text in TEXTS]
    assert records_not_known(table(without), marks)[1] == 4


def test_a_name_is_known_whatever_its_rows_hold() -> None:
    before, again = (
        table(named(["u1", "u2"], texts)) for texts in (TEXTS[:2], TEXTS[2:])
    )
    assert records_not_known(again, {*before["unit"], *before["content"]})[1] == 2


def test_decomposed_letters_are_the_same_prompt() -> None:
    apart = [unicodedata.normalize("NFD", text) for text in TEXTS]
    assert apart != TEXTS
    for one, other in (
        (named(TEXTS, TEXTS), named(apart, apart)),
        ([{"t": text} for text in TEXTS], [{"t": text} for text in apart]),
        (
            [{"m": [{"c": text}]} for text in TEXTS],
            [{"m": [{"c": text}]} for text in apart],
        ),
    ):
        before = table(one)
        marks = {*before["unit"], *before["content"]}
        assert records_not_known(table(other), marks)[1] == 4


def test_what_many_units_hold_tells_none_apart() -> None:
    """Answers of one word, say: of two users with the same one neither is the other."""
    before, new = (
        table(named([f"{n}{k}" for k in range(6)], ["yes"] * 6)) for n in "ab"
    )
    assert records_not_known(new, {*before["unit"], *before["content"]})[1] == 0


def test_rows_that_hold_an_id_alone_are_told_by_it() -> None:
    before, new = ([{"id": k} for k in range(start, start + 3)] for start in (0, 3))
    marks = {*table(before)["unit"], *table(before)["content"]}
    assert records_not_known(table(new), marks)[1] == 0


def test_a_used_split_is_known_under_other_names(tmp_path: Path) -> None:
    first = units_in(table(named([f"a{k}" for k in range(4)], TEXTS)))
    again = units_in(table(named([f"b{k}" for k in range(4)], TEXTS)))
    remember_use({"requirements": ["x <= 0.1"]}, first, tmp_path, tmp_path)
    assert len(uses_of(again, tmp_path)) == 2
    with pytest.raises(RequirementError, match="4 of 4 certification units were used"):
        check_unused({"requirements": ["x <= 0.2"]}, again, tmp_path)


def test_a_use_of_an_earlier_version_holds(here: Path) -> None:
    """It had no contents, code or base on record."""
    for path in [
        *(here / "uses").glob("*.json"),
        *(here / "out/certification").glob("*.json"),
    ]:
        found = json.loads(path.read_text())
        del found["contents"], found["use"]["code"]
        path.write_text(json.dumps(found))
    compare("--require", REQUIREMENT)
    with pytest.raises(SystemExit):
        compare("--require", "near: violated <= 0.2", output="other")
