"""compare --require: from a requirement to an exported model, or to an honest no."""

from __future__ import annotations

import errno
import functools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from scipy.stats import binom

import pl_pointwise
from pl_pointwise.cli import main
from pl_pointwise.compare import command
from pl_pointwise.errors import TrainingError
from pl_pointwise.export.loading import required_of
from pl_pointwise.identity.files import digest_now
from pl_pointwise.requirements import RequirementError
from pl_pointwise.requirements.check import check_models
from pl_pointwise.requirements.monitor import check, monitor
from pl_pointwise.requirements.p_values import betting
from pl_pointwise.requirements.samples import require_same_bounds
from tests.pl_pointwise.compare.test_command import write_files
from tests.pl_pointwise.requirements.plane_task import PlaneData, PlaneModule
from tests.programs.launch import run_on_ranks

BASE = """
model: {class_path: tests.pl_pointwise.requirements.plane_task.PlaneModule}
data: {class_path: tests.pl_pointwise.requirements.plane_task.PlaneData}
trainer: {max_epochs: 15, accelerator: cpu, logger: false, enable_checkpointing: false,
  enable_progress_bar: false, enable_model_summary: false, limit_val_batches: 0}
"""
METHODS = """
plain: null
pointwise: {model: {init_args: {formulation: {class_path: pl_pointwise.Pointwise}}}}
strict: {model: {init_args: {tolerance: 0.1, formulation: {class_path: pl_pointwise.Pointwise}}}}
"""
STRICT = METHODS.splitlines()[-1]
EASIER = "easier: {model: {init_args: {judged_by: 5.0}}}\n"
DDP = "accelerator: cpu, devices: 2, strategy: ddp"
REQUIREMENT = "near: violated <= 0.1"


PLAIN = METHODS.splitlines()[1]
LIKE = ["--data.init_args.test_file", "like"]


def write_configs(folder: Path, out: str, methods: str, base: str = BASE) -> list[str]:
    """The words of a comparison of these methods."""
    return [*write_files(folder, methods, base), "--output", str(folder / out)]


def compare(folder: Path, *more: str, out: str = "out", methods: str = METHODS) -> Path:
    main(["compare", *write_configs(folder, out, methods), *more])
    return folder / out


def refused(capsys: Any, folder: Path, *more: str, **options: Any) -> str:
    with pytest.raises(SystemExit):
        compare(folder, *more, **options)
    return capsys.readouterr().err


def answer_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "answer.json").read_text())


def change_certificate(model: Path, **changes: Any) -> None:
    path = model / "certificate/certificate.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def required(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--require", text)]


@pytest.fixture(autouse=True)
def unpainted(monkeypatch) -> None:
    """Plots take longer than these runs."""
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "draw_plots", lambda *_: None)
        # Not on record where the first test that asks for it looks.
        patch.setenv("PL_POINTWISE_USES", str(tmp_path_factory.mktemp("uses")))
        return compare(tmp_path_factory.mktemp("certified"), "--require", REQUIREMENT)


def test_the_chosen_model_is_certified_by_its_own_violations(certified) -> None:
    answer = answer_of(certified)
    name, _, seed = answer["certified"].partition(" · ")
    assert (name in ("strict", "pointwise"), seed) == (True, "seed 0")
    samples = pd.read_parquet(certified / f"runs/{name}/seed-0/samples.parquet")
    near = samples[(samples["dataset"] == "test") & (samples["quantity"] == "near")]
    violated = near.groupby("unit")["value"].max() > 0
    assert (len(near), len(violated)) == (400, 200)  # Two samples a unit.
    [found] = answer["requirements"]
    assert (found["n"], found["share"]) == (200, violated.mean())
    assert found["p"] == pytest.approx(binom.cdf(violated.sum(), 200, 0.1))
    assert found["p"] <= 0.05
    assert found["share"] < found["bound"] < 0.1
    metrics = json.loads((certified / f"runs/{name}/seed-0/result.json").read_text())[
        "metrics"
    ]
    assert answer["objective"] == metrics["val/objective"]


def test_the_certification_split_stays_out_of_tables_and_arrays(certified) -> None:
    assert "test/" not in (certified / "comparison.csv").read_text()
    with np.load(certified / "runs/plain/seed-0/violations.npz") as arrays:
        assert set(arrays) == {"val/near", "train/near"}


def test_the_model_is_exported_with_its_certificate(certified) -> None:
    model = certified / "model"
    card = (model / "README.md").read_text()
    assert "of 200 units (prompts, queries) fail" in card
    assert (
        "was shown to meet the requirement on new inputs, with 95 % confidence" in card
    )
    assert "which does not in at most 5 % of cases" in card
    assert (
        "once: 400 samples are of 200, the largest has 0.5 % of them. Warning" in card
    )
    assert "Clopper" not in card  # A statement that knows nothing of the choice.
    assert (model / "plane.pt").is_file()
    config = yaml.safe_load((model / "certificate/config.yaml").read_text())
    assert set(config) == {"model", "data", "trainer"}
    assert set(config["trainer"]) == {"precision"}


def test_a_model_is_exported_from_the_file_that_is_certified(
    tmp_path, monkeypatch
) -> None:
    """What is in memory after the file is written has no say."""
    built, init, save = (
        list[PlaneModule](),
        PlaneModule.__init__,
        Trainer.save_checkpoint,
    )

    @functools.wraps(init)
    def counted(self: PlaneModule, *args: Any, **options: Any) -> None:
        built.append(self)
        init(self, *args, **options)

    def save_and_spoil(self: Trainer, *args: Any, **options: Any) -> None:
        save(self, *args, **options)
        built[-1].weight.data.fill_(100.0)

    monkeypatch.setattr(PlaneModule, "__init__", counted)
    monkeypatch.setattr(Trainer, "save_checkpoint", save_and_spoil)
    data = ["--data.seed", "7"]  # Other samples: those of seed 0 are used.
    out = compare(tmp_path, "--require", REQUIREMENT, *data, methods=STRICT)
    stored = torch.load(out / "model/plane.pt", weights_only=True)["weight"]
    assert torch.equal(stored, built[-1].weight.detach())
    assert stored.abs().max() < 2
    assert answer_of(out)["certified"] == "strict · seed 0"


def test_the_same_command_repeats_the_answer_and_another_choice_is_refused(
    certified, capsys
) -> None:
    before = (certified / "answer.json").read_text()
    compare(certified.parent, "--require", REQUIREMENT)
    assert (certified / "answer.json").read_text() == before
    for more in (
        ["--require", "near: violated <= 0.2"],
        ["--require", REQUIREMENT, "--confidence", "0.9"],
        ["--require", REQUIREMENT, "--seeds", "0", "1"],
    ):
        said = refused(capsys, certified.parent, *more)
        assert "200 of 200 certification units were used for an" in said
        assert f"requirements {REQUIREMENT} among 3 models" in said


def test_samples_that_were_shown_in_another_folder_are_refused(
    tmp_path, capsys
) -> None:
    short = ["--trainer.max_epochs", "1", "--data.seed", "9"]
    compare(tmp_path, *short, out="one", methods=PLAIN)
    said = refused(
        capsys, tmp_path, *short, *required("near: violated <= 0.2"), methods=PLAIN
    )
    assert "200 of 200 certification units were shown before" in said


def test_a_folder_that_no_answer_wrote_is_kept(tmp_path, capsys) -> None:
    precious = tmp_path / "out/model/my_base_model.bin"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    said = refused(capsys, tmp_path, "--require", REQUIREMENT)
    assert "no comparison has written what is there" in said
    assert precious.read_text() == "precious"
    assert not (tmp_path / "out/runs").exists()


class Telltale(Callback):
    """Writes down what it hears of a test."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (Path(trainer.default_root_dir) / "told").write_text(
            str(trainer.callback_metrics)
        )


def test_no_logger_or_callback_hears_of_the_certification_split(tmp_path) -> None:
    words = [
        "--trainer.logger",
        "CSVLogger",
        "--trainer.logger.save_dir",
        str(tmp_path / "logs"),
    ]
    words += [
        "--trainer.callbacks+",
        f"{__name__}.Telltale",
        "--trainer.max_epochs",
        "1",
    ]
    out = compare(tmp_path, "--require", REQUIREMENT, *words, methods=PLAIN)
    [logged] = tmp_path.glob("logs/**/metrics.csv")
    header = logged.read_text().splitlines()[0]
    assert "val/near/violated" in header
    assert "test/" not in header
    run = out / "runs/plain/seed-0"
    assert not (run / "told").exists()
    result = json.loads((run / "result.json").read_text())
    assert {name.partition("/")[0] for name in result["metrics"]} == {"val", "train"}


class Killed(BaseException):
    """Nothing in the program handles it, as nothing handles SIGKILL."""


def test_a_run_that_was_killed_is_finished_by_the_same_command(
    tmp_path, monkeypatch
) -> None:
    values = PlaneModule.constraint_values

    def dies(self: PlaneModule, outputs: Any, batch: Any) -> Any:
        if self.trainer.testing:
            raise Killed
        return values(self, outputs, batch)

    words = ["--require", REQUIREMENT, "--trainer.max_epochs", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(PlaneModule, "constraint_values", dies)
        with pytest.raises(Killed):
            compare(tmp_path, *words, methods=PLAIN)
    out = compare(tmp_path, *words, methods=PLAIN)
    assert answer_of(out)["candidates"] == 1


def test_two_ranks_come_to_one_answer(tmp_path) -> None:
    base = BASE.replace("accelerator: cpu", DDP)
    words = write_configs(tmp_path, "out", f"{PLAIN}\n{STRICT}\n", base)
    words = [
        str(tmp_path / "uses"),
        *words,
        *required(REQUIREMENT, "lost(near) <= 0.1"),
    ]
    run_on_ranks(2, "tests.programs.compare_two_ranks", words, tmp_path)
    assert answer_of(tmp_path / "out")["certified"] == "strict · seed 0"
    assert (tmp_path / "out/model/plane.pt").is_file()
    assert len(list((tmp_path / "out/certification").iterdir())) == 1
    assert "No answer yet" not in (tmp_path / "rank1.log").read_text()


def test_requirements_hold_together_by_category_quantile_and_metric(tmp_path) -> None:
    texts = ["near/left: violated <= 0.15", "near: q90 <= 0.2", "wrong_sign <= 0.2"]
    out = compare(tmp_path, *required(*texts), methods=STRICT)
    answer = answer_of(out)
    assert [each["text"] for each in answer["requirements"]] == texts
    assert [each["category"] for each in answer["requirements"]] == ["left", None, None]
    assert answer["certified"] is not None
    assert 100 < answer["requirements"][0]["n"] < 200


def test_a_failed_run_keeps_the_certification_split_closed(tmp_path, capsys) -> None:
    # No finite step.
    heavy = "{class_path: pl_pointwise.Penalty, init_args: {weight: 1.0e+300}}"
    broken = (
        f"plain: null\nbroken: {{model: {{init_args: {{formulation: {heavy}}}}}}}\n"
    )
    with pytest.raises(SystemExit):
        compare(tmp_path, "--require", REQUIREMENT, methods=broken)
    assert "No answer yet: 1 of 2 runs failed" in capsys.readouterr().out
    assert not (tmp_path / "out/certification").exists()


@pytest.mark.parametrize(
    ("requirement", "more", "methods", "said"),
    [
        (
            "nearr: violated <= 0.1",
            [],
            METHODS,
            "no constraint 'nearr'. There are: near",
        ),
        ("near/up: violated <= 0.1", [], METHODS, "It has left, right"),
        ("near: violated <= 0.001", [], METHODS, "at least 2,995 independent samples"),
        (
            "near/left: violated <= 0.03",
            ["--data.held_out", "80"],
            METHODS,
            "category left",
        ),
        (REQUIREMENT, ["--data.shared", "true"], METHODS, "share 200 of 200 units"),
        (
            REQUIREMENT,
            ["--data.trained", "true"],
            METHODS,
            "training and the certification",
        ),
        (
            "right >= predecessor - 0.1",
            [],
            METHODS,
            "no metric of values in [0, 1] 'right'",
        ),
        (REQUIREMENT, [], METHODS + EASIER, "evaluated by different bounds"),
    ],
)
def test_what_cannot_be_certified_is_refused_before_training(
    tmp_path, capsys, requirement, more, methods, said
) -> None:
    assert said in refused(
        capsys, tmp_path, "--require", requirement, *more, methods=methods
    )
    # Before hours are spent.
    assert not list(tmp_path.glob("out/runs/*/*/result.json"))


def test_monitor_believes_like_records_and_not_drifted_ones(
    certified, tmp_path, capsys
) -> None:
    model, state = certified / "model", tmp_path / "state.json"
    [found] = monitor(model, LIKE, state=state)
    assert (found.verdict, found.n, found.again) == ("believable", 200, 0)
    assert found.share < 0.1
    # A record counts once, whenever it comes.
    [again] = monitor(model, LIKE, state=state)
    assert (again.n, again.again, again.share, again.looks) == (0, 200, None, 1)
    assert (again.verdict, again.broken, again.so_far) == (
        "believable",
        found.broken,
        200,
    )
    assert (
        "nothing speaks against it yet. no new records, 200 left out"
        in again.statement()
    )
    drifted = ["--data.init_args.test_file", "drifted", "--state", str(state)]
    with pytest.raises(SystemExit) as end:
        main(["monitor", str(model), *drifted])
    assert end.value.code == 1
    assert "near: violated <= 0.1: broken" in capsys.readouterr().out


def test_calls_one_after_another_are_one_stream(certified, tmp_path) -> None:
    before = pd.read_parquet(certified / "model/certificate/samples.parquet")
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    new = before.assign(
        unit="new " + before["unit"], content="new " + before["content"]
    )
    new = new[new["dataset"] == "test"].sort_values("unit")
    [whole] = check(certified / "model", new, one)
    for start in range(0, len(new), 50):
        [found] = check(certified / "model", new.iloc[start : start + 50], many)
    assert (found.looks, found.so_far) == (len(new) / 50, whole.n)
    assert found.broken == pytest.approx(whole.broken)


def test_a_task_of_ones_own_is_loaded_by_its_class(certified) -> None:
    """It ended in a traceback of transformers."""
    with pytest.raises(TrainingError, match=r"load\(…, module_class=YourModule\)"):
        pl_pointwise.load(certified / "model")
    module = pl_pointwise.load(
        certified / "model", quiet=True, module_class=PlaneModule
    )
    stored = torch.load(certified / "model/plane.pt", weights_only=True)["weight"]
    assert torch.equal(module.weight.detach(), stored)
    assert not module.training


RARE = ["near: violated <= 0.1", "near/left: violated <= 0.3"]


@pytest.fixture(name="watched", scope="module")
def certificate_of_two(
    certified: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A certificate of all inputs and of one category."""
    folder = tmp_path_factory.mktemp("watched") / "model"
    shutil.copytree(certified / "model", folder)
    change_certificate(folder, requirements=[{"text": text} for text in RARE])
    return folder


def records(folder: Path, name: str, category: str = "") -> pd.DataFrame:
    before = pd.read_parquet(folder / "certificate/samples.parquet")
    new = before[(before["dataset"] == "test") & (before["quantity"] == "near")]
    new = new.groupby("unit").filter(lambda each: category not in {*each["category"]})
    return new.assign(unit=name + new["unit"], content=name + new["content"])


def test_a_requirement_without_new_records_leaves_the_others_watched(
    watched, tmp_path
) -> None:
    state = tmp_path / "state.json"
    everywhere, left = check(watched, records(watched, "a", category="left"), state)
    assert (left.n, left.looks, left.share) == (0, 0, None)
    assert (everywhere.n > 10, everywhere.looks, everywhere.verdict) == (
        True,
        1,
        "believable",
    )
    one = records(watched, "b").iloc[:1]  # A batch of one record.
    assert check(watched, one, state)[0].so_far == everywhere.n + 1


def test_a_state_is_of_one_certificate(watched, tmp_path) -> None:
    """Another model's with the same requirement, number and share took the calls over."""
    state, other = tmp_path / "state.json", tmp_path / "other"
    check(watched, records(watched, "a"), state)
    shutil.copytree(watched, other)
    change_certificate(other, date="2030-01-01")
    check(other, records(watched, "b"), state)  # The same, written on another day.
    change_certificate(other, certified="another · seed 0")
    with pytest.raises(RequirementError, match="of another certificate"):
        check(other, records(watched, "c"), state)


@pytest.mark.parametrize("damage", ["cut off", "list", "deep", "other values"])
def test_a_damaged_state_is_one_sentence(damage: str, watched, tmp_path) -> None:
    state = tmp_path / "state.json"
    check(watched, records(watched, "a"), state)
    whole = state.read_text()
    texts = {"cut off": whole[:-3], "list": "[]", "deep": "[" * 100_000}
    state.write_text(texts.get(damage, whole.replace('"looks": 1', '"looks": 2')))
    with pytest.raises(
        RequirementError, match=r"state\.json is damaged, or of an earlier"
    ):
        check(watched, records(watched, "b"), state)


def test_calls_at_once_are_all_on_record(watched, tmp_path) -> None:
    state = tmp_path / "state.json"
    with ThreadPoolExecutor(4) as pool:
        batches = [records(watched, f"{number} ").iloc[:6] for number in range(12)]
        list(pool.map(lambda new: check(watched, new, state), batches))
    assert json.loads(state.read_text())["calls"][RARE[0]]["looks"] == 12


def test_a_verdict_is_said_where_the_state_cannot_be_written(
    watched, tmp_path, monkeypatch
) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    said = r"(?s)No space left on device\. These .*0\.1: nothing speaks .*0\.3: nothing speaks"
    with pytest.raises(RequirementError, match=said):
        check(watched, records(watched, "a"), tmp_path / "state.json")
    assert not [*tmp_path.glob("*.json"), *tmp_path.glob("*.part")]


def test_check_says_whether_a_model_may_replace_another(certified, capsys) -> None:
    words = [str(certified / "model"), *LIKE]
    main(["check", *words, "--against", words[0]])  # Nothing is lost against itself.
    said = capsys.readouterr().out
    assert "**Yes**" in said
    assert "- lost(near) <= 0.05: **met**. 0 of 200 units" in said
    with pytest.raises(SystemExit) as end:
        main(
            [
                "check",
                *words,
                "--against",
                "start",
                "--require",
                "near: violated <= 0.001",
            ]
        )
    assert end.value.code == 1
    assert "**No**" in capsys.readouterr().out


def test_models_judged_by_different_bounds_are_not_compared(
    certified, tmp_path
) -> None:
    """A value above one bound may be below the other: nothing would be lost."""
    with pytest.raises(RequirementError, match="evaluated by different bounds"):
        require_same_bounds({"one": {"near": "0.5"}, "other": {"near": "0.4"}})
    stricter = tmp_path / "stricter"
    shutil.copytree(certified / "model", stricter)
    config = stricter / "certificate/config.yaml"
    config.write_text(config.read_text().replace("judged_by: 0.5", "judged_by: 0.4"))
    path = stricter / "certificate/certificate.json"
    files = json.loads(path.read_text())["files"]
    files |= {"certificate/config.yaml": digest_now(config)}
    change_certificate(stricter, files=files)
    said = r"stricter was certified by the bounds .*0\.5.*, and the configuration gives .*0\.4"
    with pytest.raises(RequirementError, match=said):
        check_models(certified / "model", stricter, LIKE)
    # As of an earlier version: the checkpoint has them.
    change_certificate(stricter, bounds={})
    with pytest.raises(
        RequirementError, match=r"certified with --model\.judged_by 0\.5"
    ):
        check_models(certified / "model", stricter, LIKE)


def test_a_model_is_certified_beside_the_one_that_it_started_from(tmp_path) -> None:
    """Weights of 0 answer 0: what they meet and their metric are read off the data."""
    paired = ["lost(near) <= 0.1", "wrong_sign <= predecessor + 0.2"]
    noise = ["--data.noise", "0.22"]
    out = compare(tmp_path, *required(*paired, REQUIREMENT), *noise, methods=STRICT)
    answer = answer_of(out)
    assert answer["certified"] == "strict · seed 0"
    assert (
        "The predecessor is the model of strict · seed 0 before training."
        in answer["statement"]
    )
    data = PlaneData(noise=0.22)
    data.setup("test")
    started = np.array([row["y"].abs().item() <= 0.5 for row in data.datasets["test"]])
    samples = pd.read_parquet(out / "runs/strict/seed-0/samples.parquet")
    samples = samples[samples["dataset"] == "test"].sort_values(["quantity", "index"])
    near = samples[samples["quantity"] == "near"]["value"].to_numpy() <= 0
    lost = (started & ~near).reshape(200, 2).any(1).sum()
    assert lost > 0
    before = 100 * started.reshape(200, 2).all(1).mean()
    assert (
        f"; the predecessor meets it on {before:.3g} % of them" in answer["statement"]
    )
    found = {each["text"]: each for each in answer["requirements"]}
    assert found[paired[0]]["share"] == lost / 200
    assert found[paired[0]]["p"] == pytest.approx(binom.cdf(lost, 200, 0.1))
    wrong = samples[samples["quantity"] == "wrong_sign"]  # Of the start none is wrong.
    losses = (1 + wrong.groupby("unit")["value"].mean().to_numpy()) / 2
    assert found[paired[1]]["p"] == pytest.approx(betting(losses, 0.6))
    assert (
        f"{wrong['value'].mean():.3g} worse than the predecessor" in answer["statement"]
    )

    assert "worse than the predecessor" in required_of(out / "model")

    # The monitor has no predecessor, and leaves them out.
    state = tmp_path / "state.json"
    watched = [each.verdict for each in monitor(out / "model", LIKE, state=state)]
    assert watched == [*["not watched"] * 2, "believable"]
    verdicts = check_models(out / "model", "start", LIKE)
    assert [each.requirement.text for each in verdicts[:3]] == [*paired, REQUIREMENT]


def test_monitor_says_what_it_lacks(certified, capsys) -> None:
    for words, said in (
        ([str(certified)], "there is no certificate"),
        ([str(certified / "model")], "Say where the new records are"),
        (
            [str(certified / "model"), "--data.tst_file", "x"],
            "'tst_file' is not accepted. Did you",
        ),
    ):
        with pytest.raises(SystemExit):
            main(["monitor", *words])
        assert said in capsys.readouterr().err
