"""The command line: LightningCLI's fit, validate, test and predict, and our own commands."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter, get_loader, set_loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

from . import cli_errors
from .checkpoint_options import CheckpointConfig, differences, hyperparameters, sources, usable
from .cli_errors import NotBuilt, NotChecked, ShortErrorParser, short_errors
from .cli_run import (
    default_logger,
    find_classes_of_the_folder,
    missing_data,
    tell_after_fit,
    tell_after_predict,
    tell_after_test,
)
from .configs import OPTIONS, nearest, overview, with_config_parts
from .extras import import_all_classes, import_classes
from .module import PointwiseModule
from .option_names import meant_file
from .saved_config import SaveConfig

COMMANDS = {
    "compare": "compare.command",
    "export": "export",
    "monitor": "requirements.monitor",
    "report": "compare.report",
    "tolerances": "requirements.tolerances",
}
"""Modules of this package with a ``main(args)``, beside LightningCLI's subcommands."""

OF_STRANGERS = ("export", "monitor", "report")
"""What is run on downloads, maybe within their folder, whose files are importable with --config."""

DESCRIPTION = "Fine-tuning under pointwise constraints. There are also:\n  " + "\n  ".join(
    f"pl-pointwise {command} --help" for command in COMMANDS
)
DESCRIPTION += "\nErrors are one sentence; with --debug, or PL_POINTWISE_DEBUG=1, all there is."


_load_yaml = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """Loads YAML, and imports the tasks and callbacks that it names by their short names."""
    value = _load_yaml(text)
    import_classes(re.findall(r"[\w.]+", str(value)))
    return value


set_loader("yaml", load_yaml, (yaml.YAMLError,))  # Also of options' values: --model RerankerModule.


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the list of configurations."""


class PointwiseCLI(LightningCLI):
    """LightningCLI over the tasks, with packaged configurations by name (``--config reranker``).

    Args:
        args: a command line; None takes the process's.
        run: False only builds trainer, model and data, as ``compare`` needs them.
    """

    other_options: Sequence[str] = ()
    """Options of the command around it, which are suggested beside its own."""

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        args = sys.argv[1:] if args is None else args
        self._words = args if isinstance(args, list) else []
        args = with_config_parts(args)
        if isinstance(args, list) and any(re.search(r"^-h$|help$", word) for word in args[1:]):
            import_all_classes()  # The help of a subcommand lists them.
        # The command line is handed on with the names of configurations resolved.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        super().__init__(
            PointwiseModule,
            None,  # Any LightningDataModule, or none where the module has loaders of its own.
            subclass_mode_model=True,
            save_config_callback=SaveConfig,
            parser_class=ShortErrorParser,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "prog": "pl-pointwise",
                "description": DESCRIPTION,
                "epilog": overview(),
                "formatter_class": HelpFormatter,
                "version": version("pl-pointwise"),
                # A comparison reports what is wrong with a method instead of ending there.
                "exit_on_error": run,
            },
            args=args,
            run=run,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        assert isinstance(parser, ShortErrorParser)
        parser.outermost, parser.other_options = True, self.other_options
        parser.words = self._words
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self._args = args
        if isinstance(args, list) and not isinstance(self, BuildableCLI):
            words = [word for word in args if word.partition("=")[0] != "--print_config"]
            if words != args:
                refuse_what_a_run_would(words)
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Takes a checkpoint's arguments of the model, which Lightning lets win over all others.

        What wins over what: checkpoint_options.py.
        """
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if path and _is_missing(str(path)):
            self._parser(subcommand).error(
                f"--ckpt_path {path}: there is no such file.{meant_file(str(path))}"
            )
        if not path or not os.path.isfile(path) or not isinstance(self._args, Sequence):
            super()._parse_ckpt_path()  # Of a command line that is a mapping.
            return
        stored = hyperparameters(path)
        class_path = self.config[subcommand].model.class_path
        kind = resolve_name(class_path)
        of = str(stored.pop("_class_path", class_path)).rpartition(".")[2]
        if of not in [parent.__name__ for parent in kind.__mro__]:
            self.parser.error(
                f"--ckpt_path {path} is of a {of}, and the command line asks for a "
                f"{kind.__name__}. Give the configuration it was trained with."
            )
        arguments, problems = usable(stored, kind)
        if problems:
            rank_zero_warn(f"--ckpt_path {path}: not taken of it {', '.join(problems)}.")
        with CheckpointConfig(subcommand, self._args, class_path, arguments) as checkpoint:
            self.config = self.parser.parse_args(checkpoint.in_its_place())
            theirs = self.parser.parse_args(checkpoint.last())
        before, now = (each[subcommand].model.as_dict() for each in (theirs, self.config))
        self._tell_sources(path, differences(before, now), set(now["init_args"]) - set(stored))

    def _tell_sources(
        self, path: str, changed: dict[str, tuple[Any, Any]], absent: Iterable[str]
    ) -> None:
        """In config.yaml and, but for a fit, which says so itself when it resumes, in a warning."""
        subcommand = self.config.subcommand
        parser = self._parser(subcommand)
        changed = {f"model.{name}": values for name, values in changed.items()}
        absent = [f"model.init_args.{name}" for name in sorted(absent)]
        parser.dump_header = [*(parser.dump_header or []), *sources(path, changed, absent)]
        if changed and subcommand != "fit":
            shown = [f"{name} {now!r} (its {old!r})" for name, (old, now) in changed.items()]
            rank_zero_warn(
                f"Not as in the checkpoint {path}, as the command line says otherwise: "
                f"{', '.join(shown)}."
            )

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        if self.subcommand:
            kwargs = {**default_logger(self.config[self.subcommand].trainer), **kwargs}
        try:
            return super().instantiate_trainer(**kwargs)
        except MisconfigurationException as error:
            config = self.config[self.subcommand] if self.subcommand else self.config
            kind = config.trainer.accelerator
            if kind in ("auto", "cpu") or not re.search("backend found|not available", str(error)):
                raise
            raise MisconfigurationException(
                f"--trainer.accelerator {kind}: torch finds none on this machine. Give cpu, or "
                "auto, which takes what there is."
            ) from error

    def before_instantiate_classes(self) -> None:
        """A checkpoint is data: unless told otherwise, none is loaded in a way that runs code."""
        self._require_data()
        if not self.subcommand:
            return
        config = self.config[self.subcommand]
        if config.weights_only is None:
            config.weights_only = True
        if "verbose" in config:
            config.verbose = False  # Lightning's tables cut the names off; ours follows.

    def _add_instantiators(self) -> None:
        super()._add_instantiators()  # Of model and data; the first that fits is taken.
        self.parser.add_instantiator(cli_errors.build, object)

    def instantiate_classes(self) -> None:
        if self.subcommand is None:
            self._instantiate()
            return
        with short_errors(self.program, (ValueError, TypeError, ImportError, RuntimeError)):
            self._instantiate()

    @property
    def program(self) -> str:
        """What the command is called in errors."""
        return f"pl-pointwise {self.subcommand}" if self.subcommand else "pl-pointwise"

    def _instantiate(self) -> None:
        try:
            super().instantiate_classes()
        except NotBuilt as failed:
            raise failed.error from failed.error.__cause__

    def _require_data(self) -> None:
        config = self.config[self.subcommand] if self.subcommand else self.config
        kind, data = resolve_name(config.model.class_path), config.get("data")
        data = data and resolve_name(data.class_path)
        problem = missing_data(kind, self.subcommand, data)
        if problem is not None:
            (self._parser(self.subcommand) if self.subcommand else self.parser).error(problem)

    def after_fit(self) -> None:
        tell_after_fit(self)

    def after_validate(self) -> None:
        self._print_metrics()

    def after_predict(self) -> None:
        tell_after_predict(self)

    def after_test(self) -> None:
        self._print_metrics()
        tell_after_test(self)

    def _print_metrics(self) -> None:
        """A line per metric, a column per evaluated data set."""
        if not self.trainer.is_global_zero:
            return
        table: dict[str, dict[str, float]] = {}
        for name, value in self.trainer.callback_metrics.items():
            stage, _, metric = name.partition("/")
            table.setdefault(metric, {})[stage] = float(value)
        stages = list(dict.fromkeys(stage for values in table.values() for stage in values))
        width = max(map(len, table), default=0)
        print(" " * width + "".join(f"{stage:>14}" for stage in stages))
        for metric, values in table.items():
            cells = [f"{values[stage]:.4g}" if stage in values else "" for stage in stages]
            print(f"{metric:<{width}}" + "".join(f"{cell:>14}" for cell in cells))


class ParsedCLI(PointwiseCLI):
    """A command line that is read and checked, with nothing built."""

    def instantiate_classes(self) -> None:
        pass


class BuildableCLI(PointwiseCLI):
    """A command line of which all is built that a run would build, but what takes long.

    That is the trainer, which needs the machine that the run is for, and whatever reads the files
    of a model: a constructor ends there, what it checks before has passed.
    """

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        assert isinstance(parser, ShortErrorParser)
        parser.may_be_incomplete = True
        return parser

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def instantiate_classes(self) -> None:
        with cli_errors.without_loading():
            super().instantiate_classes()

    def _set_seed(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def refuse_what_a_run_would(args: Sequence[str]) -> None:
    """For ``--print_config``, which jsonargparse answers before it has validated anything.

    A configuration without a model or without data, a template, passes.
    """
    if any(word in PointwiseCLI.subcommands() for word in args):
        with suppress(NotChecked):
            BuildableCLI(list(args))


def _is_missing(path: str) -> bool:
    """Whether a checkpoint's path, and no word or address that Lightning knows, leads nowhere."""
    words = ("best", "last", "hpc")
    return path not in words and "://" not in path and not path.startswith("registry") and not (
        os.path.exists(path)
    )  # fmt: skip


def main(args: Sequence[str] | None = None) -> None:
    """Runs the console script ``pl-pointwise``; ``args`` stands for the command line."""
    from_shell = args is None
    args = list(sys.argv[1:] if args is None else args)
    if "--debug" in args:
        args.remove("--debug")
        os.environ[cli_errors.DEBUG] = "1"  # Processes that it starts show everything too.
    first = args[0] if args and not args[0].startswith("-") else None
    known = [*PointwiseCLI.subcommands(), *COMMANDS]
    names_config = any(word.partition("=")[0] in OPTIONS for word in args)
    if from_shell and (first not in OF_STRANGERS or names_config):
        find_classes_of_the_folder()
    program = f"pl-pointwise {first}" if first in known else "pl-pointwise"
    with short_errors(program):
        if first in COMMANDS:
            importlib.import_module(f"pl_pointwise.{COMMANDS[first]}").main(args[1:])
            return
        if first is not None and first not in known:
            near = nearest(first, known)
            cli_errors.end(program, f"there is no command {first!r}.{near} --help lists them.")
        PointwiseCLI(args)
