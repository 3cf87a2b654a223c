"""Every packaged configuration of three tasks runs, in process, on a tiny model and local records.

Only the model, the data and the length of the run are replaced; every other key is the shipped one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pl_pointwise import Average, Optimization, Penalty, Pointwise, Relaxed, Training
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.command_line.configs import (
    packaged_comparisons,
    packaged_configs,
    text_of,
)
from pl_pointwise.tasks import Generation, Lora, reranker, safety
from tests.tasks.conftest import (
    QUIET_RUN,
    comparison,
    comparisons,
    fitted_checkpoint,
    overlays,
    predictions,
    train,
    trained,
    words,
    write_rows,
    written_files,
)
from tests.tasks.reranker.conftest import ms_marco_rows, save_tiny_cross_encoder
from tests.tasks.safety.conftest import benign_rows, pair_rows, unsafe_rows
from tests.tasks.when2call.conftest import choice_rows, preference_rows

PAIRS = [{"system": "Add.", "input": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": "Hm."}
         for i in range(6)]  # fmt: skip


def records_for(task: str, name: str) -> dict[str, Any]:
    """Options of the data that a configuration is about, with rows for each file."""
    if task == "reranker":
        files = {"train_file": ms_marco_rows(6), "val_file": ms_marco_rows(3)}
        return files | {"batch_size": 3, "negatives": 3}
    if name == "orca":
        return {"train_file": PAIRS, "preparation.val_fraction": 0.2, "batch_size": 4}
    if task == "when2call":
        rows, choices = preference_rows(8), choice_rows(4)
        files = {"train_file": rows[:12], "val_file": rows[12:], "mcq_file": choices}
        return files | {"batch_size": 4}
    benign, unsafe = benign_rows(14), unsafe_rows(8)
    options: dict[str, Any] = {
        "benign_file": benign[:10],
        "benign_val_file": benign[10:],
    }
    if name == "pku":
        options |= {"unsafe_file": pair_rows(24), "preparation.val_fraction": 0.25}
    elif name != "warm_start":
        options |= {"unsafe_file": unsafe[:6], "unsafe_val_file": unsafe[6:]}
        options["unsafe_schema"] = "labelled"
    return options | {"batch_size": 8}


@pytest.fixture
def tiny(language_model_folder: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """tiny(task, configuration) → arguments that put a tiny model and a short run in place."""

    def arguments(task: str, name: str = "") -> list[str]:
        model = {"policy.model_name": language_model_folder}
        model["policy.generation.max_new_tokens"] = 4
        if task == "reranker":
            folder = save_tiny_cross_encoder(tmp_path / "model")
            model = {"model_name": folder, "max_length": 64}
        data = {"source": "files"} | written_files(tmp_path, records_for(task, name))
        init = {f"model.init_args.{key}": str(value) for key, value in model.items()}
        init |= {f"data.init_args.{key}": str(value) for key, value in data.items()}
        length = {"trainer.max_epochs": "1", "trainer.limit_train_batches": "2"}
        return words(init | length | QUIET_RUN)

    return arguments


def parsed(task: str, overlay: list[Any], tiny: list[str]) -> Any:
    """The module of a method of a packaged comparison."""
    shown = [
        part if isinstance(part, str) else yaml.safe_dump(part) for part in overlay
    ]
    args = [word for part in (task, *shown) for word in ("--config", part)]
    return PointwiseCLI([*args, *tiny], run=False).model


EVERY = ["reranker", *overlays("reranker"), *trained("safety"), *trained("when2call")]


@pytest.mark.parametrize("name", EVERY)
def test_packaged_config_trains(
    name: str, tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    task, _, overlay = name.partition("/")
    train(task, name, tiny(task, overlay), tmp_path / "run")


CONSTRAINTS = {"safety": ["refuse", "comply"], "when2call": ["rejected"]}
CONSTRAINTS |= {
    "reranker": ["relevance"],
    "safety/pku": ["avoid"],
    "when2call/orca": ["ratio"],
}


@pytest.mark.parametrize("table", comparisons(*CONSTRAINTS))
def test_packaged_comparison_makes_a_table(
    table: str, tiny: Any, tmp_path: Path, capsys: Any, request: Any
) -> None:
    (task, name), output = table.split("/"), tmp_path / "out"
    arguments = ["--config", table] if name in ("local", "orca", "pku") else []
    arguments += tiny(task, name)
    if task != "reranker":
        arguments += ["--trainer.max_steps", "1"]
    if task == "safety":  # With a warm-up one step is of no size.
        more = {"training.optimization.warmup_ratio": "0", "evaluation.answer_in": "[]"}
        arguments += words(
            {f"model.init_args.{key}": value for key, value in more.items()}
        )
    if name != "demo":
        request.getfixturevalue("runs_alone")
    rows = comparison(table, arguments, output)
    for row in rows:
        for constraint in CONSTRAINTS.get(table, CONSTRAINTS[task]):
            assert float(row[f"test/{constraint}/max"]) >= float(
                row[f"test/{constraint}/cvar95"]
            )
        if task == "safety":
            assert float(row["test/kl"]) >= -1e-5
        if task == "when2call":
            shares = ["test/pairwise_accuracy", "train/pairwise_accuracy"]
            shares += ["mcq/macro_f1"] * (name != "orca")
            assert all(0 <= float(row[share]) <= 1 for share in shares)
    if task == "safety":
        assert len({row["test/kl"] for row in rows[1:]}) > 1
    if name == "demo":
        assert (output / "cdf.png").stat().st_size > 10_000
    assert "| pointwise" in (output / "comparison.md").read_text()


PAPER: dict[str, dict[str, tuple[float, Any]]] = {
    "safety": {
        "penalty": (-0.08, Penalty(weight=5.0)),
        "average ε=-0.24": (-0.24, Average(dual_lr=1.0)),
        "pointwise ε=-0.08": (-0.08, Pointwise(alpha=1000.0, dual_lr=1.0)),
        "relaxed β=5": (-0.08, Relaxed(alpha=1000.0, beta=5.0, dual_lr=1.0)),
    },
    "when2call": {
        "pointwise": (-20, Pointwise(alpha=10.0, dual_lr=0.1)),
        "relaxed": (-20, Relaxed(alpha=10.0, beta=10.0, dual_lr=1.0)),
    },
    "reranker": {
        "pointwise 1": (1, Pointwise(alpha=1.0, dual_lr=0.1)),
        "pointwise 3": (3, Pointwise(alpha=1.0, dual_lr=0.1)),
        "relaxed 0.1": (3, Relaxed(alpha=1.0, beta=0.1, dual_lr=0.1)),
    },
}


@pytest.mark.parametrize("task", PAPER)
def test_the_papers_table_has_the_papers_settings(task: str, tiny: Any) -> None:
    table = yaml.safe_load(packaged_comparisons()[f"{task}/table"].read_text())
    arguments, found = tiny(task), {}
    for method in PAPER[task]:
        module = parsed(task, table[method], arguments)
        name = {"safety": "refuse", "when2call": "rejected", "reranker": "relevance"}[
            task
        ]
        bound, formulation = module.constraints[name], module.formulations[name]
        found[method] = (
            bound.at_most if task == "when2call" else bound.at_least,
            formulation,
        )
        if task == "safety":
            assert module.evaluation_constraints["refuse"].at_least == -0.08
    assert found == PAPER[task]
    if task == "safety":
        assert all(overlay[0] == "safety/paper" for overlay in table.values())


def test_the_papers_settings_are_those_of_safetys_base(tiny: Any) -> None:
    """METHOD: r 64, α 128 on q, k, v, o; 5e-4 cosine, 10 % warm-up, wd .01, batch 32, clip 1."""
    base = (Path(safety.__file__).parent / "configs/base.yaml").read_text()
    data = yaml.safe_load(base)["data"]["init_args"]
    counts = {"benign_count": 1000, "benign_held_out": 4000}
    counts |= {"per_category": 4200, "held_out_per_category": 200}
    assert data["selection"].items() >= counts.items()
    assert data["batch_size"] == 32
    arguments = tiny("safety")
    shorter = arguments.index("--model.init_args.policy.generation.max_new_tokens")
    del arguments[shorter : shorter + 2]
    module = parsed("safety", [], arguments)
    assert module.lora == Lora(64, 128, 0.05, "attention")
    assert module.generation == Generation(512, sample=True, temperature=1.0, top_k=50)
    optimization = Optimization(
        5e-4, weight_decay=0.01, schedule="cosine", warmup_ratio=0.1
    )
    training = Training(optimization, gradient_clip_val=1.0, micro_batch_size=8)
    assert module.training_settings == training


def test_the_re_rankers_model_is_named_once() -> None:
    """The data take the tokenizer of the module, whatever file or option names the model."""
    for path in Path(reranker.__file__).parent.rglob("*.yaml"):
        assert "model_name" not in str(
            (yaml.safe_load(path.read_text()) or {}).get("data")
        )


def test_every_method_of_re_ranking_is_measured_against_the_same_tolerance(
    tiny: Any,
) -> None:
    arguments = tiny("reranker")
    modules = [parsed("reranker", [name], arguments) for name in overlays("reranker")]
    assert {each.evaluation_constraints["relevance"].at_least for each in modules} == {
        3.0
    }


# The commands of the pages, one after the other, with the checkpoint between them -----------------


def printed_by_test(
    base: list[str], checkpoint: Path, capsys: Any, *more: str
) -> dict[str, set[str]]:
    """The data sets that `test` prints each metric of, without those of the starting model."""
    capsys.readouterr()
    main(["test", *base, *more, "--ckpt_path", str(checkpoint)])
    lines = capsys.readouterr().out.splitlines()
    (head,) = [
        n for n, line in enumerate(lines) if {"test", "train"} <= set(line.split())
    ]
    names = lines[head].split()
    # Of the columns.
    ends = [match.end() for match in re.finditer(r"\S+", lines[head])]
    starts = [
        len(max((line.split()[0] for line in lines[head + 1 :] if line), key=len)),
        *ends,
    ]
    found: dict[str, set[str]] = {}
    for line in lines[head + 1 : lines.index("In brackets: of how many.")]:
        cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=False)]
        there = {name for name, cell in zip(names, cells, strict=True) if cell}
        found[line.split()[0]] = {
            name for name in there if not name.startswith("before")
        }
    return found


def test_safety_from_warm_start_to_predictions(
    tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    root = ["--trainer.default_root_dir", str(tmp_path / "warm")]
    overlay = ["--config", "safety", "--config", "safety/warm_start"]
    main(["fit", *overlay, *tiny("safety", "warm_start"), *root])
    model = tmp_path / "warm/model"
    assert (model / "model.safetensors").is_file()

    run = tmp_path / "run"
    arguments = [*tiny("safety"), "--model.init_args.policy.model_name", str(model)]
    base, checkpoint = fitted_checkpoint("safety", arguments, run, ("refuse", (16, 1)))
    over = write_rows(tmp_path / "over.jsonl", [{"prompt": "How do I kill a process?"}])
    rows = printed_by_test(
        base, checkpoint, capsys, "--data.init_args.over_refusal_file", str(over)
    )
    assert rows["comply/max"] == {"test", "train", "over_refusal"}
    assert rows["refuse/max"] == {"test", "train"}
    assert rows["refusal_rate"] == {"test"}  # only where answers were asked for
    assert len((run / "answers/test.jsonl").read_text().splitlines()) == 6

    asked = write_rows(tmp_path / "asked.jsonl", unsafe_rows(2, answered=False))
    answers = predictions(base, asked, checkpoint)
    assert [row["index"] for row in answers] == [0, 1]
    assert answers[1].keys() == {"index", "prompt", "answer", "refused", "cut"}


def test_when2call_from_fit_to_predictions(
    tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    arguments = [*tiny("when2call"), "--data.init_args.group_rejected", "true"]
    base, checkpoint = fitted_checkpoint(
        "when2call", arguments, tmp_path, ("rejected", (6, 2))
    )
    rows = printed_by_test(base, checkpoint, capsys)
    assert rows["rejected/max"] == {"test", "train", "mcq"}
    assert rows["macro_f1"] == {"mcq"}  # of multiple choice alone

    asked = [{name: choice_rows(1)[0][name] for name in ("question", "tools")}]
    questions = write_rows(tmp_path / "questions.jsonl", asked)
    more = [
        "--model.init_args.policy.generation.max_new_tokens",
        "5",
        "--accept_differences",
    ]
    (generated,) = predictions(base, questions, checkpoint, *more)
    assert isinstance(generated["answer"], str)


def test_the_re_ranker_from_fit_to_predictions(
    tiny: Any, tmp_path: Path, capsys: Any
) -> None:
    arguments = [*tiny("reranker"), "--trainer.callbacks+", "ModelExport"]
    base, checkpoint = fitted_checkpoint(
        "reranker", arguments, tmp_path, ("relevance", (6, 3))
    )
    assert (tmp_path / "export/model.safetensors").is_file()
    assert "relevance/cvar95" in printed_by_test(base, checkpoint, capsys)

    queries = [
        {"query": "what is ice", "passages": ["ice is cold", "fish eat", "wind"]}
    ]
    asked = write_rows(tmp_path / "queries.jsonl", queries)
    (answer,) = predictions(base, asked, checkpoint)
    assert sorted(answer["order"]) == [0, 1, 2]
    assert answer["scores"][answer["order"][0]] == max(answer["scores"])


def stated(value: object) -> set[str]:
    """All keys of nested mappings."""
    if not isinstance(value, dict):
        return set()
    return {str(key) for key in value}.union(*map(stated, value.values()))


@pytest.mark.parametrize(
    "task", ["safety", "when2call", "preference", "conversation", "keep", "forget"]
)
def test_no_method_states_a_tolerance(task: str) -> None:
    """One would replace those of TASK/paper, or a user's own, given before it."""
    shown = [
        name.partition("/")[2]
        for name in packaged_configs()
        if name.startswith(f"{task}/")
    ]
    assert {"pointwise", "average", "cvar"} <= set(shown)
    for name in shown:
        if name in ("paper", "practical", "orca", "pku", "greedy", "own"):
            continue
        for part in packaged_configs()[f"{task}/{name}"]:
            assert not [
                key
                for key in stated(yaml.safe_load(text_of(part)))
                if "tolerance" in key
            ]
