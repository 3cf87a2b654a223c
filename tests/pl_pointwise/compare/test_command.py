"""A comparison keeps finished runs, runs changed ones again, and says why a run failed."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch
import yaml

from pl_pointwise.certificates import certify
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.compare import checks
from pl_pointwise.compare import command as compare
from pl_pointwise.compare.plots import PLOTS
from pl_pointwise.compare.runs import Run
from tests.pl_pointwise.line_task import LineData

BASE = """
model: {class_path: tests.pl_pointwise.line_task.LineModule, init_args: {tolerance: 0.5}}
data: {class_path: tests.pl_pointwise.line_task.LineData}
trainer: {max_epochs: 2, accelerator: cpu, logger: false, enable_checkpointing: false,
  enable_progress_bar: false, enable_model_summary: false}
"""
METHODS = """
plain: null
pointwise: {model: {init_args: {formulation: {class_path: pl_pointwise.Pointwise}}}}
"""


def write_files(folder: Path, methods: str = METHODS) -> list[str]:
    (folder / "base.yaml").write_text(BASE)
    (folder / "methods.yaml").write_text(methods)
    return ["--config", str(folder / "base.yaml"), "--methods", str(folder / "methods.yaml")]


@pytest.fixture
def files(tmp_path) -> list[str]:
    return write_files(tmp_path)


@pytest.fixture
def unpainted(monkeypatch) -> None:
    """Plots take longer than these runs."""
    monkeypatch.setattr(compare, "draw_plots", lambda *_: None)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of two methods at two seeds; one's name is hostile."""
    folder = tmp_path_factory.mktemp("compared")
    methods = METHODS.replace("plain:", "'<script>alert(1)</script> & co':")
    run(write_files(folder, methods), folder / "out", "--seeds", "0", "1")
    return folder / "out"


def run(files: list[str], output: Path, *more: str) -> list[dict[str, str]]:
    main(["compare", *files, "--output", str(output), *more])
    return read(output)


def read(output: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((output / "comparison.csv").open()))


def methods_executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    executed: list[str] = []
    real = compare.execute

    def execute(run: Run, **more: Any) -> Any:
        executed.append(run.method)
        return real(run, **more)

    monkeypatch.setattr(compare, "execute", execute)
    return executed


def test_a_line_per_run_with_every_metric_and_std_over_seeds(compared) -> None:
    lines = read(compared)
    assert [(r["method"], r["seed"]) for r in lines] == [
        ("<script>alert(1)</script> & co", "0"),
        ("<script>alert(1)</script> & co", "1"),
        ("pointwise", "0"),
        ("pointwise", "1"),
    ]
    for stage in ("test", "train"):
        for statistic in ("mean", "max", "violated", "cvar95"):
            assert all(r[f"{stage}/fit/{statistic}"] for r in lines)
    assert float(lines[2]["train/fit/cvar95"]) < float(lines[0]["train/fit/cvar95"])
    assert all(float(line["epoch_seconds"]) > 0 for line in lines)
    table = (compared / "comparison.md").read_text()
    assert "±" in table
    assert r"\toprule" in (compared / "comparison.tex").read_text()
    assert len((compared / "summary.csv").read_text().splitlines()) > 10
    for title in ("Results", "The gap", "Multipliers", "Certificates", "Time and memory"):
        assert f"## {title}" in table


def test_the_multipliers_share_of_the_pull_is_shown_without_a_callback(compared) -> None:
    lines = read(compared)
    shares = [line["dual/fit/share"] for line in lines]
    assert shares[:2] == ["", ""]  # A method without multipliers.
    assert all(0 < float(share) < 1 for share in shares[2:])
    table = (compared / "comparison.md").read_text().partition("## Multipliers")[2]
    header, _, plain, pointwise = table.partition("## ")[0].strip().splitlines()[-4:]
    assert header == "| method | fit: λ's share of the pull | fit: overshoot |"
    assert plain.endswith("| – | – |")
    mean, spread = pointwise.split("|")[2].split(" ± ")
    assert float(mean) == pytest.approx(sum(map(float, shares[2:])) / 2, rel=1e-2)
    assert float(spread) >= 0


def test_every_plot_there_is_something_for_is_drawn(compared) -> None:
    drawn = {path.name for path in compared.glob("*.png")}
    assert not list(compared.glob("*.pdf"))
    others = {"categories.png", "answer.png"}  # The task has no categories, nothing is required.
    assert drawn == set(PLOTS) - others
    for name in drawn:
        assert (compared / name).read_bytes()[:4] == b"\x89PNG"


def test_the_certificates_are_of_each_models_held_out_samples(compared) -> None:
    for entry in json.loads((compared / "comparison.json").read_text())["runs"]:
        worst = np.load(compared / entry["folder"] / "worst.npz")["fit"]
        pooled = np.load(compared / entry["folder"] / "violations.npz")["test/fit"]
        assert sorted(worst) == sorted(pooled)  # One value per sample here.
        certificate = entry["result"]["certificates"]["fit"]
        expected = certify(torch.from_numpy(worst))
        assert certificate["bound"] == expected.bound
        assert certificate["statement"] == expected.statement()


def test_the_configuration_left_behind_is_that_of_the_run(compared) -> None:
    path = compared / "runs/pointwise/seed-1/config.yaml"
    config = yaml.safe_load(path.read_text())
    assert config["seed_everything"] == 1
    assert config["trainer"]["max_epochs"] == 2
    cli = PointwiseCLI(["--config", str(path)], run=False)
    assert repr(cli.model.formulations["fit"]).startswith("Pointwise(alpha='adaptive'")
    assert cli.model.constraints["fit"].at_most == 0.5


def test_finished_runs_are_not_run_again_and_changed_ones_are(
    files, tmp_path, monkeypatch, unpainted
) -> None:
    first = run(files, tmp_path / "out")
    executed = methods_executed(monkeypatch)
    assert run(files, tmp_path / "out") == first
    assert executed == []
    changed = METHODS.replace("Pointwise}", "Pointwise, init_args: {alpha: 3.0}}")
    (tmp_path / "methods.yaml").write_text(changed)
    again = run(files, tmp_path / "out")
    assert executed == ["pointwise"]
    assert again[1]["train/fit/mean"] != first[1]["train/fit/mean"]


def test_a_sweep_is_a_method_per_value_and_goes_on_where_it_stopped(
    files, tmp_path, monkeypatch, unpainted
) -> None:
    path = "model.formulation.init_args.alpha"
    config = ["--config", str(tmp_path / "base.yaml"), "--model.formulation", "Pointwise"]
    first = run(config, tmp_path / "out", "--set", f"{path}=0.5")
    executed = methods_executed(monkeypatch)
    rows = run(config, tmp_path / "out", "--set", f"{path}=0.5,5")
    assert executed == ["base, alpha=5"]
    assert rows[0]["train/fit/mean"] == first[0]["train/fit/mean"] != rows[1]["train/fit/mean"]


def test_a_failed_run_is_a_line_that_says_why(files, tmp_path, unpainted) -> None:
    broken = METHODS + "broken: {model: {init_args: {fail: true}}}\n"
    (tmp_path / "methods.yaml").write_text(broken)
    with pytest.raises(SystemExit, match=r"1 run failed: broken \(seed 0\)"):
        run(files, tmp_path / "out")
    rows = read(tmp_path / "out")
    assert [r["error"] for r in rows] == ["", "", "RuntimeError: asked to fail"]
    assert "failed: RuntimeError: asked to fail" in (tmp_path / "out/comparison.md").read_text()
    main(["report", str(tmp_path / "out")])
    page = (tmp_path / "out/report.html").read_text()
    assert "1 of 3 runs have no results" in page
    assert "asked to fail" in page


def test_a_run_that_left_part_of_its_files_is_run_again(files, tmp_path, unpainted) -> None:
    first = run(files, tmp_path / "out")
    for method, name in (("plain", "result.json"), ("pointwise", "worst.npz")):
        (found,) = (tmp_path / "out/runs" / method).rglob(name)
        found.unlink()
    again = run(files, tmp_path / "out")
    assert len(list((tmp_path / "out/runs").rglob("*.npz"))) == 4
    for before, after in zip(first, again, strict=True):
        assert before["train/fit/mean"] == after["train/fit/mean"]
        assert before["fit_seconds"] != after["fit_seconds"]


def test_a_metric_that_does_not_exist_costs_only_the_pareto_plot(files, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        run(files, tmp_path / "out", "--pareto", "test/objective", "test/mrr")
    assert "choose two of test/objective" in capsys.readouterr().err
    assert (tmp_path / "out/comparison.md").is_file()
    assert (tmp_path / "out/cdf.png").is_file()
    assert not (tmp_path / "out/pareto.png").exists()


# The report -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would make of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report(compared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    main(["report", str(compared), "--output", str(path)])
    return path


def test_the_report_is_one_page_that_needs_nothing_and_runs_nothing(report) -> None:
    text = report.read_text()
    page = Page(text)
    assert page.open == []
    assert page.tags["code"] > 0
    assert "`" not in page.text.partition("Runs")[0]
    assert page.tags["img"] == len(PLOTS) - 2
    assert page.tags["table"] == 6
    assert "λ&#39;s share of the pull" in text
    assert page.tags["details"] == 2
    ids = {value for name, value in page.attributes if name == "id"}
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name == "src":
            assert str(value).startswith("data:image/png;base64,iVBOR")
        elif name == "href" and str(value).startswith("#"):
            assert str(value)[1:] in ids
        elif name == "href":
            assert (report.parent / unquote(str(value)) / "result.json").is_file()
    assert len([1 for name, value in page.attributes if name == "href" and value[0] != "#"]) == 4
    assert "://" not in text
    assert "<script>alert(1)</script> & co" in page.text
    assert "Clopper–Pearson" in page.text
    assert "max_epochs: 2" in page.text
    assert "pl-pointwise compare --config" in page.text
    assert version("torch") in page.text


def test_only_the_script_that_sorts_may_run(report) -> None:
    text = report.read_text()
    page = Page(text)
    assert page.tags["script"] == 1
    (policy,) = [str(v) for n, v in page.attributes if n == "content" and "default-src" in str(v)]
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert "innerHTML" not in script


def test_every_line_of_a_table_leads_to_its_run(report) -> None:
    text = report.read_text()
    for cell in re.findall(r"<td>(.*?)</td>", text):
        assert re.match(r'<a href="#method-[12](-seed-[01])?">', cell)
    runs = text.partition("<h2>Runs</h2>")[2]
    second = runs.partition('<section id="method-2">')[2]
    assert "<h3>pointwise</h3>" in second
    assert "runs/pointwise/seed-1/" in second.partition('id="method-2-seed-1"')[2]


def test_a_hostile_error_is_text_in_the_report(compared, tmp_path) -> None:
    record = json.loads((compared / "comparison.json").read_text())
    error = "</pre><img src=x onerror=alert(1)><a href='https://a.b'>"
    record["runs"][0]["result"] = {"error": error}
    record["command"] = error
    (tmp_path / "comparison.json").write_text(json.dumps(record))
    main(["report", str(tmp_path)])
    page = Page((tmp_path / "report.html").read_text())
    assert error in page.text
    assert "img" not in page.tags  # That folder has no plots.
    hrefs = [str(value) for name, value in page.attributes if name == "href"]
    assert all(href.startswith(("#method-", "./runs/")) for href in hrefs)


def test_the_report_shows_nothing_from_outside_its_folder(compared, tmp_path, capsys) -> None:
    here, secret = tmp_path / "here", tmp_path / "secret"
    secret.mkdir()
    (secret / "config.yaml").write_text("password: x")
    record = json.loads((compared / "comparison.json").read_text())
    (here / "runs").mkdir(parents=True)
    (here / "runs/linked").symlink_to(secret)
    for folder in ("../secret", str(secret), "runs/linked"):
        record["runs"][0]["folder"] = folder
        (here / "comparison.json").write_text(json.dumps(record))
        with pytest.raises(SystemExit):
            main(["report", str(here)])
        assert "leads out of the folder" in capsys.readouterr().err
    assert not (here / "report.html").exists()


@pytest.mark.parametrize("text", [None, "[1]", '{"command": "", "runs": [{}]}', "nonsense"])
def test_a_folder_without_a_comparison_is_refused(tmp_path, capsys, text) -> None:
    if text is not None:
        (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert "comparison.json" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


MANY = f"""
fine: null
named wrongly: [reranker/pointwize]
class: {{model: {{init_args: {{formulation: {{class_path: Pointwize}}}}}}}}
value:
  model: {{init_args: {{formulation: {{class_path: Pointwise, init_args: {{alpha: -1}}}}}}}}
option: {{trainer: {{max_epoks: 3}}}}
same option: {{trainer: {{max_epoks: 4}}}}
import: {{model: {{class_path: nowhere.Module}}}}
no overlay: 3
file: [./nofile.yaml]
data: {{data: {{class_path: {__name__}.FileData, init_args: {{train_file: ./nothere.csv}}}}}}
"""


class FileData(LineData):
    """Data of a file."""

    def __init__(self, train_file: str) -> None:
        super().__init__()
        self.train_file = train_file


def test_all_that_is_wrong_is_said_method_by_method_before_the_first_run(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = write_files(tmp_path, MANY)
    expected = {
        "named wrongly": "Did you mean 'reranker/pointwise'?",
        "class": "Did you mean 'Pointwise'?",
        "value": "alpha must be a finite number > 0",
        "option, same option": "Did you mean 'trainer.max_epochs'?",
        "import": "No module named 'nowhere'",
        "no overlay": "3 is no overlay",
        "file": "No configuration './nofile.yaml'",
        "data": "data.train_file: there is no file ./nothere.csv.",
    }
    with pytest.raises(SystemExit) as ended:
        run(files, tmp_path / "out", "--jobs", "2")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("error: nothing was run; 9 of 10 methods cannot run:")
    said = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert list(said) == list(expected)
    assert not [name for name, part in expected.items() if part not in said[name]]
    assert not (tmp_path / "out").exists()


def test_a_job_array_does_not_look_for_files_of_the_machines_it_is_for(tmp_path, capsys) -> None:
    data = f"{{class_path: {__name__}.FileData, init_args: {{train_file: /scratch/x.csv}}}}"
    files = write_files(tmp_path, f"elsewhere: {{data: {data}}}\n")
    main(["compare", *files, "--output", str(tmp_path / "out"), "--slurm-array"])
    assert "sbatch" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["compare", *files, "--output", str(tmp_path / "out"), "--slurm-array", "--fti", "1"])
    assert "unrecognized arguments: --fti 1" in capsys.readouterr().err


def test_what_is_finished_is_not_checked_again(files, tmp_path, monkeypatch, unpainted) -> None:
    run(files, tmp_path / "out")
    monkeypatch.setattr(checks, "_check", lambda *_: pytest.fail("was finished"))
    run(files, tmp_path / "out")
