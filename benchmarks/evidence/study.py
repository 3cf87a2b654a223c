"""One task of the evidence: its records, configuration and grid, and the runs of every stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pl_pointwise.compare.runs import Comparison, Run

from . import splits
from .choice import Measured
from .errors import MissingError
from .grids import Entry, read_grid, write_methods
from .results import RESULTS, Place, Result, read_results
from .splits import Grouped, Sizes
from .statistics import mean

HERE = Path(__file__).parent


def _takes_settings(path: Path) -> bool:
    return "settings_of" in yaml.safe_load(path.read_text(encoding="utf-8"))


STUDIES = {
    path.stem: path
    for path in sorted(
        (HERE / "studies").glob("*.yaml"), key=lambda p: (_takes_settings(p), p)
    )
}
"""The file of every task; those that take the settings of another come after it."""

Metrics = Mapping[str, float]
Value = Callable[[Metrics], float]

STATISTICS = ("objective", "cvar95", "violated")
"""What methods are chosen and compared by; lower is better in each."""

QUICK = ["--trainer.max_steps", "2", "--trainer.limit_test_batches", "2"]

OPTIONS = {
    "queries": ("train_file", "val_file"),
    "pairs": ("train_file", "val_file"),
    "benign": ("benign_file", "benign_val_file"),
    "unsafe": ("unsafe_file", "unsafe_val_file"),
}
"""The data module's options by kind of record: for training, and for what is measured on."""


@dataclass(frozen=True)
class Planned:
    """One method's run in one stage.

    Attributes:
        entry: the method in its setting.
        run: its folder here.
        published: what it reached elsewhere; None if it has to be run.
    """

    entry: Entry
    run: Run
    published: Result | None = None

    @property
    def result(self) -> Result | None:
        """What it reached here, else what is published; None if it is not finished."""
        result = self.run.result()
        return self.published if result is None or "error" in result else result


@dataclass(frozen=True)
class Study:
    """What ``studies/NAME.yaml`` says, with the folders of this machine.

    Args:
        name: of the task.
        described: the file's content.
        data: the folder of records; None where there is none.
        models: the folder of weights.
        output: where runs go.
        quick: two steps a run and one setting a method, to try the machinery.
        published: results that stand for runs of the same method, setting and seed.
    """

    name: str
    described: Mapping[str, Any]
    data: Path | None
    models: Path | None
    output: Path
    quick: bool = False
    published: Mapping[Place, Result] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return str(self.described["title"])

    @property
    def objective(self) -> str:
        """The metric that is minimised, as evaluation names it."""
        return str(self.described["objective"])

    @property
    def constraints(self) -> list[str]:
        return list(self.described["constraints"])

    def value(self, name: str, stage: str = "test") -> Value:
        """Returns what reads a statistic: of violations the mean over the constraints.

        NaN where a run has none of it.
        """
        names = [f"{stage}/{each}/{name}" for each in self.constraints]
        if name == "objective":
            names = [f"{stage}/{self.objective}"]
        return lambda metrics: mean([metrics.get(each, math.nan) for each in names])

    @property
    def settings_of(self) -> str | None:
        """The task whose chosen settings are judged here without tuning."""
        return self.described.get("settings_of")

    def entries(self) -> list[Entry]:
        """Every method in every setting; in a quick run in its first setting alone."""
        found = read_grid(HERE / "grids" / f"{self.described['grid']}.yaml")
        if self.quick:
            return list({entry.method: entry for entry in reversed(found)}.values())[
                ::-1
            ]
        return found

    def model(self) -> str:
        """Returns what the configuration calls the model.

        Raises:
            MissingError: there is no such folder.
        """
        name = str(self.described["model"])
        if name == "smollm":
            from .smollm import converted

            return str(converted(self.output.parent / "smollm2-135m"))
        return str(self._folder(self.models, name, "EVIDENCE_MODELS"))

    def comparison(self, entries: Sequence[Entry], stage: str, seed: int) -> Comparison:
        """Returns the comparison of these methods, for one stage and seed.

        stage: "tune" measures on the validation part, "judge" on the test part.

        Raises:
            MissingError: records or weights are not there.
        """
        folder = self.output / stage
        methods, config = folder / f"methods-{seed}.yaml", self.output / "config.yaml"
        write_methods([*entries], methods)
        overlay = self._with_model(self.model())
        config.write_text(yaml.safe_dump(overlay, sort_keys=False), encoding="utf-8")
        files = splits.write_splits(self._records(), self.output / "data", seed)
        held_out = files["validation" if stage == "tune" else "test"]
        overrides = []
        for kind, path in files["train"].items():
            for option, file in zip(OPTIONS[kind], (path, held_out[kind]), strict=True):
                overrides += [f"--data.init_args.{option}", str(file)]
        return Comparison(
            [*self.described["configs"], str(config)],
            folder,
            str(methods),
            [seed],
            overrides=[*overrides, *(QUICK if self.quick else [])],
        )

    def runs(self, entries: Sequence[Entry], stage: str, seed: int) -> list[Planned]:
        """Returns every method's run in one stage, whether finished or not."""
        if not entries:
            return []
        runs = self.comparison(entries, stage, seed).runs
        return [
            Planned(entry, run, self.published.get((stage, entry.name, seed)))
            for entry, run in zip(entries, runs, strict=True)
        ]

    def _with_model(self, model: str) -> dict[str, Any]:
        """The configuration that every run shares, over the packaged ones."""
        config: dict[str, Any] = yaml.safe_load(
            yaml.safe_dump(dict(self.described["config"]))
        )
        arguments = config.setdefault("model", {}).setdefault("init_args", {})
        if "policy" in arguments:
            arguments["policy"]["model_name"] = model
        else:
            arguments["model_name"] = model
        return config

    def _records(self) -> dict[str, tuple[list[Grouped], Sizes]]:
        """Records and sizes by kind."""
        described = self.described["records"]
        readers: dict[str, tuple[str, Callable[[], list[Grouped]]]] = {
            "corpus": ("queries", lambda: splits.corpus(described["negatives"])),
            "msmarco": ("queries", lambda: splits.msmarco(self._data("msmarco"))),
            "when2call": (
                "pairs",
                lambda: splits.when2call(
                    self._data("when2call"),
                    described["longest_prompt"],
                    described["longest_answer"],
                ),
            ),
            "benign": (
                "benign",
                lambda: splits.benign(
                    self._data("alpaca"), described["answer_characters"]
                ),
            ),
            "unsafe": ("unsafe", lambda: splits.unsafe(self._data("safety"))),
        }
        return {
            readers[source][0]: (readers[source][1](), Sizes(**sizes))
            for source, sizes in described["parts"].items()
        }

    def _data(self, needed: str) -> Path:
        """The folder of all records, which must have a folder of this name."""
        return self._folder(self.data, needed, "EVIDENCE_DATA").parent

    def _folder(self, root: Path | None, name: str, variable: str) -> Path:
        if root is None:
            raise MissingError(f"needs {variable}=FOLDER, with {name} in it")
        if not (root / name).is_dir():
            raise MissingError(f"{root / name} is not there")
        return (root / name).absolute()


def measured(study: Study, planned: Planned) -> Measured | None:
    """Returns what a run reached on held-out data, None if it is not finished."""
    result = planned.result
    if result is None:
        return None
    reached = (study.value(name)(result["metrics"]) for name in STATISTICS)
    return Measured(planned.entry, planned.run.seed, *reached)


def load(
    name: str,
    data: Path | None,
    models: Path | None,
    output: Path,
    quick: bool = False,
    published: bool = False,
) -> Study:
    """Returns the study of a task, whose runs go below ``output``.

    published: go on from the committed results.
    """
    described = yaml.safe_load(STUDIES[name].read_text(encoding="utf-8"))
    folder = output / (f"{name}-quick" if quick else name)
    folder.mkdir(parents=True, exist_ok=True)
    results = read_results(RESULTS / f"{name}.csv") if published else {}
    return Study(name, described, data, models, folder, quick, results)
