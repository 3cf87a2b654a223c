"""What a comparison runs: rows × values of its settings × seeds, each run with its own folder.

A rows file is YAML, name → overlay, where an overlay is a mapping merged over the configuration
(``model: {init_args: {tolerance: 3}}``), the name or path of another configuration, or a list of
such. Settings sweep one hyperparameter each, by its dotted path on the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.configs import config_path

ARRAYS = ("violations.npz", "worst.npz")
"""Written before ``result.json``: all violations, and the worst one of every held-out sample."""


@dataclass(frozen=True)
class Run:
    """One row at one seed.

    It is finished once its folder holds the arrays and a ``result.json`` without an error, of this
    very configuration: ``digest`` tells one configuration from another.
    """

    row: str
    seed: int
    folder: Path
    arguments: list[str]
    overlays: dict[Path, str]
    """Files that ``arguments`` name, to be written before."""
    digest: str

    def result(self) -> dict[str, Any] | None:
        """What the last run of this very configuration came to: its figures, or ``error``."""
        path = self.folder / "result.json"
        if not path.is_file():
            return None
        result: dict[str, Any] = json.loads(path.read_text())
        complete = "error" in result or all((self.folder / name).is_file() for name in ARRAYS)
        return result if complete and result.get("digest") == self.digest else None

    @property
    def finished(self) -> bool:
        result = self.result()
        return result is not None and "error" not in result

    def violations(self) -> dict[str, np.ndarray]:
        """Held-out and training violations by ``stage/constraint``, (n,) each."""
        return _arrays(self.folder / ARRAYS[0])

    def worst(self) -> dict[str, np.ndarray]:
        """The worst held-out violation of every sample by constraint, (samples,) each."""
        return _arrays(self.folder / ARRAYS[1])


@dataclass(frozen=True)
class Comparison:
    """The arguments of one comparison.

    Args:
        configs: the base, then overlays; names or paths.
        output: the folder for runs and results.
        rows: the rows file, name or path; None for one row, the configuration as it is.
        seeds: of every row.
        settings: ``path=value,value,…`` each; several give the product of their values.
        overrides: further options of every run, ``--trainer.max_epochs 1`` for one, which does not
            train a row that says ``trainer: {max_epochs: 0}``.
    """

    configs: Sequence[str]
    output: Path
    rows: str | None = None
    seeds: Sequence[int] = (0,)
    settings: Sequence[str] = ()
    overrides: Sequence[str] = field(default=())

    def arguments(self) -> list[str]:
        """The command line that stands for this comparison."""
        words = [word for config in self.configs for word in ("--config", config)]
        words += ["--rows", self.rows] if self.rows is not None else []
        words += ["--seeds", *map(str, self.seeds), "--output", str(self.output)]
        words += [word for setting in self.settings for word in ("--set", setting)]
        return [*words, *self.overrides]

    def command(self) -> str:
        return shlex.join(["pl-pointwise", "compare", *self.arguments()])

    @cached_property
    def runs(self) -> list[Run]:
        """Every run, in the rows file's order.

        Raises:
            FileNotFoundError: a configuration that does not exist.
            ValueError: the rows file is not a mapping of names to overlays, two rows would share a
                folder, or a setting names what a row's configuration does not have.
        """
        bases = [config_path(config) for config in self.configs]
        swept = product_of(self.settings)
        runs: list[Run] = []
        taken: dict[Path, str] = {}
        for row, overlay in self._overlays().items():
            for label, options in swept:
                name = f"{row}, {label}" if label else row
                below = self.output / "runs" / re.sub(r"[^\w.=-]+", "-", name).strip("-")
                if taken.setdefault(below, name) != name:
                    raise ValueError(
                        f"Rows {taken[below]!r} and {name!r} would share the folder {below}: "
                        "name one of them otherwise."
                    )
                for seed in self.seeds:
                    run = self._run(name, seed, below / f"seed-{seed}", bases, overlay, options)
                    runs.append(run)
                if options:
                    _check_options(runs[-1], options)
        return runs

    def _overlays(self) -> dict[str, Any]:
        if self.rows is None:
            last = self.configs[-1]
            return {Path(last).stem if Path(last).suffix else last: None}
        overlays = yaml.safe_load(Path(config_path(self.rows, rows=True)).read_text())
        if not isinstance(overlays, Mapping) or not overlays:
            raise ValueError(f"{self.rows}: expected a mapping of row names to overlays.")
        return {str(row): overlay for row, overlay in overlays.items()}

    def _run(
        self,
        row: str,
        seed: int,
        folder: Path,
        bases: Sequence[str],
        overlay: Any,
        options: Sequence[str],
    ) -> Run:
        files = list(bases)
        texts = [Path(file).read_text() for file in files]
        written: dict[Path, str] = {}
        untrained: list[str] = []
        for position, part in enumerate(overlay if isinstance(overlay, list) else [overlay]):
            if isinstance(part, str):
                files.append(config_path(part))
                texts.append(Path(files[-1]).read_text())
            elif isinstance(part, Mapping):
                path = folder / f"overlay-{position}.yaml"
                files.append(str(path))
                written[path] = yaml.safe_dump(dict(part), sort_keys=False)
                texts.append(written[path])
                trainer = part.get("trainer")
                if isinstance(trainer, Mapping) and "max_epochs" in trainer:
                    unfitted = trainer["max_epochs"] == 0
                    untrained = ["--trainer.max_epochs", "0"] if unfitted else []
            elif part is not None:
                raise ValueError(f"{self.rows}: row {row!r} holds {part!r}, not an overlay.")
        overrides = [*self.overrides, *untrained, *options]
        digest = hashlib.sha256(json.dumps([texts, overrides, seed]).encode()).hexdigest()
        arguments = [word for file in files for word in ("--config", file)]
        arguments += [*overrides, "--seed_everything", str(seed)]
        arguments += ["--trainer.default_root_dir", str(folder)]
        return Run(row, seed, folder, arguments, written, digest)


def product_of(settings: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Every combination of the settings' values, as a label and the options that set them.

    Raises:
        ValueError: a setting that is not ``path=value,…``, or one path twice.

    >>> product_of(["model.tolerance=1,3", "model.formulation.init_args.beta=0.1"])[1]
    ('tolerance=3, beta=0.1', ['--model.tolerance=3', '--model.formulation.init_args.beta=0.1'])
    """
    swept: dict[str, list[str]] = {}
    for setting in settings:
        path, equals, values = setting.partition("=")
        path = path.strip().removeprefix("--")
        if not re.fullmatch(r"\w+(\.\w+)+", path) or not equals:
            raise ValueError(
                f"--set {setting}: expected a dotted path and its values, as in "
                "model.formulation.init_args.beta=0.1,1,10"
            )
        if path in swept:
            raise ValueError(f"--set {path} is given twice: write all its values behind one.")
        swept[path] = split_values(values)
        if not all(swept[path]):
            raise ValueError(f"--set {setting}: a value is missing.")
    last = [path.rpartition(".")[2] for path in swept]
    names = [
        short if last.count(short) == 1 else path for path, short in zip(swept, last, strict=True)
    ]
    return [
        (
            ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True)),
            [f"--{path}={value}" for path, value in zip(swept, values, strict=True)],
        )
        for values in itertools.product(*swept.values())
    ]


def split_values(text: str) -> list[str]:
    """The values between commas; commas within brackets, braces or quotes separate none.

    >>> split_values("0.1, [a, b], 'x,y'")
    ['0.1', '[a, b]', "'x,y'"]
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


class ParsedCLI(PointwiseCLI):
    """A command line that is read and checked, with nothing built."""

    def instantiate_classes(self) -> None:
        pass


def _check_options(run: Run, options: Sequence[str]) -> None:
    """
    Raises:
        ValueError: the row's configuration does not have what the options set, or not that value.
    """
    with tempfile.TemporaryDirectory() as folder:  # The run's own folder is not there yet.
        moved = {str(path): Path(folder) / path.name for path in run.overlays}
        for path, text in run.overlays.items():
            moved[str(path)].write_text(text)
        try:
            ParsedCLI([str(moved.get(word, word)) for word in run.arguments], run=False)
        except (argparse.ArgumentError, SystemExit) as error:
            raise ValueError(
                f"--set {' '.join(option[2:] for option in options)} does not fit row "
                f"{run.row!r}; nothing was run. Set what every row has. The parser says:\n{error}"
            ) from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}
