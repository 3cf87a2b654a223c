"""What a comparison runs: methods × values of its settings × seeds, each run with its own folder.

A methods file is YAML, name → change: a mapping merged over the configuration, the name or path of
another one, or a list of such. Settings sweep one hyperparameter each, by its dotted path.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only

from pl_pointwise.command_line.cli_errors import debugging, sentence
from pl_pointwise.command_line.configs import (
    comparison_path,
    config_parts,
    read_mapping,
    require_order,
    text_of,
)
from pl_pointwise.errors import DataError
from pl_pointwise.identity.files import digest_now
from pl_pointwise.identity.models import is_as_it_was
from pl_pointwise.requirements import Requirement
from pl_pointwise.requirements.requirement import distinct

RESULT, VIOLATIONS = "result.json", "violations.npz"
"""Written before the result: all violations."""


@dataclass(frozen=True)
class Run:
    """One method at one seed; finished once its folder holds a result of this configuration, of the
    files that it read, and with the files that it wrote.
    """

    method: str
    seed: int
    folder: Path
    arguments: list[str]
    digest: str
    certified: bool = False
    """Whether it is a candidate for a requirement: then its files hold what that takes."""

    @property
    def title(self) -> str:
        return f"{self.method} · seed {self.seed}"

    def result(self) -> dict[str, Any] | None:
        """Returns what the last run of this very configuration ended in: metrics, or ``error``.

        None also where a file that it read or wrote, its base model or its code is another now.
        """
        try:
            result: dict[str, Any] = json.loads((self.folder / RESULT).read_text())
        # Not run yet, or stopped while it wrote: it is run again.
        except (OSError, ValueError):
            return None
        if not isinstance(result, dict):  # Damaged.
            return None
        for name, digest in result.get("wrote", {}).items():
            if digest_now(self.folder / name) != digest:
                return None
        for name, digest in result.get("read", {}).items():
            if not is_as_it_was(name, digest):
                return None
        # A result of another configuration is none of this run's.
        return result if result.get("digest") == self.digest else None

    @property
    def finished(self) -> bool:
        result = self.result()
        return result is not None and "error" not in result

    def violations(self) -> dict[str, np.ndarray]:
        """Held-out and training violations by ``stage/constraint``, (n,) each."""
        with np.load(self.folder / VIOLATIONS) as stored:
            return dict(stored)


Outcome = tuple[Run, Mapping[str, Any]]
"""A run and its result, as ``result.json`` holds it."""


@dataclass(frozen=True)
class Comparison:
    """The arguments of one comparison, as the command takes them.

    Args:
        methods: None for one method, the configuration unchanged.
        settings: ``path=value,value,…`` each; several give the product of their values.
        overrides: further options of every run, ``--trainer.max_epochs 1`` for one, which does not
            train a method that says ``trainer: {max_epochs: 0}``.
    """

    configs: Sequence[str]
    output: Path
    methods: str | None = None
    seeds: Sequence[int] = (0,)
    settings: Sequence[str] = ()
    overrides: Sequence[str] = ()
    requirements: Sequence[str] = ()
    confidence: float = 0.95

    @cached_property
    def required(self) -> list[Requirement]:
        """The requirements, each once; what is wrong with one is a RequirementError."""
        return distinct(self.requirements)

    @cached_property
    def runs(self) -> list[Run]:
        """Every run, in the methods file's order; a method that is wrong is a DataError."""
        require_order(self.configs)
        base = list[str]()
        for config in self.configs:
            base += config_parts(config)
        runs = list[Run]()
        methods_by_folder = dict[Path, str]()
        swept = product_of(self.settings)
        for (method, overlay), (label, options) in itertools.product(
            self._overlays().items(), swept
        ):
            # YAML reads a method called 1 as a number.
            name = f"{method}, {label}" if label else str(method)
            folder = self.output / "runs" / re.sub(r"[^\w.=-]+", "-", name).strip("-")
            with errors_of(name):
                # A name of signs alone leaves nothing, and one of dots leads out of the folder.
                if folder.parent.name != "runs" or not folder.name.strip("."):
                    raise DataError(
                        "gives its folder no name. Put a letter or digit in it."
                    )
                # "a b" and "a/b" would be one folder, and each would overwrite the other's results.
                other = methods_by_folder.setdefault(folder, name)
                if other != name:
                    raise DataError(f"would share the folder {folder} with {other!r}.")
                parts, untrained = _parts_of(overlay)
                # The last word counts: what is swept overrides what all runs have, and a method
                # that is not trained stays so whatever number of epochs they have.
                words = [*self.overrides, *untrained, *options]
                for seed in self.seeds:
                    runs.append(self._run(name, seed, folder, [*base, *parts], words))
        return runs

    def _overlays(self) -> Mapping[str, Any]:
        """The methods: changes of the configuration by name."""
        if self.methods is not None:
            overlays: Mapping[str, Any] = read_mapping(comparison_path(self.methods))
            return overlays
        last = self.configs[-1]
        name = Path(last).stem if Path(last).suffix else last
        return {name: None}

    def _run(
        self,
        method: str,
        seed: int,
        folder: Path,
        configs: Sequence[str],
        words: Sequence[str],
    ) -> Run:
        """The run of a method, in its own folder, at one seed."""
        # Its text and not its name: a file that was edited since makes another run.
        described: list[Any] = [[text_of(config) for config in configs], words, seed]
        if self.requirements:
            described.append("certified")  # Another run, of more files.
        own_folder = folder / f"seed-{seed}"
        arguments = list[str]()
        for config in configs:
            arguments += ["--config", config]
        arguments += [*words, "--seed_everything", str(seed)]
        arguments += ["--trainer.default_root_dir", str(own_folder)]
        return Run(
            method=method,
            seed=seed,
            folder=own_folder,
            arguments=arguments,
            digest=hashlib.sha256(json.dumps(described).encode()).hexdigest(),
            certified=bool(self.requirements),
        )


def _parts_of(overlay: Any) -> tuple[list[str], list[str]]:
    """Returns the configurations of a change, and the option of a method that is not trained."""
    configs = list[str]()
    untrained = list[str]()
    for part in overlay if isinstance(overlay, list) else [overlay]:
        if isinstance(part, str):
            configs += config_parts(part)
        elif isinstance(part, Mapping):
            configs.append(yaml.safe_dump(dict(part), sort_keys=False))
            trainer = part.get("trainer")
            if isinstance(trainer, Mapping) and "max_epochs" in trainer:
                # Behind the options of all runs, whose number of epochs is for trained methods.
                untrained = (
                    ["--trainer.max_epochs", "0"] if trainer["max_epochs"] == 0 else []
                )
        # Nothing behind a method's name: the configuration as it is.
        elif part is not None:
            raise DataError(
                f"{part!r} is no configuration: write a mapping, a name or a path."
            )
    return configs, untrained


@contextmanager
def errors_of(method: str) -> Iterator[None]:
    """What is wrong within the block becomes a DataError that names the method."""
    try:
        yield
    except Exception as error:
        # Whoever looks for the place of an error wants the error itself.
        if debugging():
            raise
        raise DataError(f"nothing was run; {method}: {sentence(error)}") from error


def product_of(settings: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns every combination of the settings' values, as a label and the options that set them.

    >>> product_of(["model.tolerance=1,3", "model.formulation.init_args.beta=0.1"])[1]
    ('tolerance=3, beta=0.1', ['--model.tolerance=3', '--model.formulation.init_args.beta=0.1'])
    >>> len(product_of(["model.tolerance=1,1"]))
    1
    """
    swept: dict[str, list[tuple[str, str]]] = {}
    for setting in settings:
        path, equals, values = setting.partition("=")
        path = path.strip().removeprefix("--")
        if not re.fullmatch(r"\w+(\.\w+)+", path) or not equals:
            raise DataError(
                f"--set {setting}: write a dotted path and its values, a.b=0.1,1,10"
            )
        if path in swept:
            raise DataError(
                f"--set {path} is given twice: write all its values behind one."
            )
        # A value that is given twice would be two runs of one configuration.
        distinct_values = [*dict.fromkeys(value.strip() for value in values.split(","))]
        if not all(distinct_values):
            raise DataError(f"--set {setting}: a value is missing.")
        name = path.rpartition(".")[2]
        swept[path] = [
            (f"{name}={value}", f"--{path}={value}") for value in distinct_values
        ]
    combinations = []
    for combination in itertools.product(*swept.values()):
        labels = [label for label, _ in combination]
        combinations.append((", ".join(labels), [option for _, option in combination]))
    return combinations


def on_first_rank() -> bool:
    """Whether this process is rank 0, also before there is a trainer."""
    return not getattr(rank_zero_only, "rank", 0)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """One process at a time in a folder, made if need be; its other ranks come with the first."""
    # A lock that the first rank holds would stop its own other ranks.
    if not on_first_rank():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".in-use.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise DataError(
            f"{folder}: another comparison runs there. Wait until it ends, or take another "
            "--output."
        ) from None
    try:
        yield
    finally:
        lock.release()
