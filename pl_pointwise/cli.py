"""The command line: LightningCLI's fit, validate, test and predict, and our own commands."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter, get_loader, set_loader
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    ModelCheckpoint,
    ProgressBar,
)
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from .command_line import cli_errors, own_code
from .command_line.cli_errors import ShortErrorParser, innermost, short_errors
from .command_line.configs import OPTIONS, overview, with_config_parts
from .command_line.metrics_table import metrics_table, samples_measured
from .command_line.next_steps import (
    command_for,
    config_in,
    config_of,
    config_option,
    exports,
    require_class,
    short_path,
)
from .errors import TrainingError
from .extras import import_classes
from .files import free_path, run_root, write_whole
from .module import PointwiseModule
from .printing import print_in_any_encoding
from .report.of_run import write_fit_page
from .report.of_test import write_test_page
from .report.progress import RunProgressBar
from .training.checkpoints import differences, hyperparameters

COMMANDS = {
    "compare": "compare.command",
    "export": "export.command",
    "check": "requirements.check",
    "lost": "requirements.lost",
    "monitor": "requirements.monitor",
    "tolerances": "requirements.tolerances",
}
"""Modules of this package with a ``main(args)``, besides LightningCLI's subcommands."""

OF_STRANGERS = ("check", "export", "monitor")
"""What is run on downloads, maybe within their folder, whose files are importable with --config."""

DESCRIPTION = (
    "Fine-tuning under pointwise constraints. There are also:\n  "
    + "\n  ".join(f"pl-pointwise {command} --help" for command in COMMANDS)
)
DESCRIPTION += (
    "\nErrors are one sentence; with --debug, or PL_POINTWISE_DEBUG=1, all there is."
)


_load_yaml = get_loader("yaml")


def load_yaml(text: str) -> Any:
    """Loads YAML, and imports the tasks and callbacks that it names by their short names."""
    value = _load_yaml(text)
    own_code.allow_named(value)
    import_classes(re.findall(r"[\w.]+", str(value)))
    return value


own_code.allow_as_the_parent_did()
# Also of options' values: --model RerankerModule.
set_loader("yaml", load_yaml, (yaml.YAMLError,))
# Its advertisements.
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda record: "💡 Tip" not in record.getMessage()
)


NOISE = (
    # They are handed on with the names of configurations resolved.
    "LightningCLI's args",
    ".*isinstance.treespec, LeafSpec",
    "No seed found",
    # Of a logger that nobody asked for: what is logged goes into a CSV file.
    "Starting from v1.9.0, `tensorboardX` has been removed",
)
"""Warnings that say nothing to who runs a command."""


class SaveConfig(SaveConfigCallback):
    """Saves the configuration in the run's own folder: config.yaml, and ``fit`` over no file."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder = run_root(trainer)  # Asks all ranks.
        super().setup(trainer, pl_module, stage)

    def save_config(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        if stage == "fit" or config_in(self._folder) is None:
            path = free_path(self._folder, "config", ".yaml")
            write_whole(path, self.parser.dump(self.config, skip_none=False))


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the list of configurations."""


class PointwiseCLI(LightningCLI):
    """LightningCLI over the tasks, with packaged configurations by name (``--config reranker``).

    Args:
        args: a command line; None takes the process's.
        run: False only builds trainer, model and data, as ``compare`` needs them.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        args = sys.argv[1:] if args is None else args
        if isinstance(args, list):
            args = with_config_parts(args)
            if any(re.search(r"^-h$|help$", word) for word in args[1:]):
                import_classes()  # The help of a subcommand lists them.
        for message in NOISE:
            warnings.filterwarnings("ignore", message=message)
        super().__init__(
            PointwiseModule,
            # Any LightningDataModule, or none where the module has loaders of its own.
            None,
            subclass_mode_model=True,
            # Not within another command, whose folder may be that of a run.
            save_config_callback=SaveConfig if run else None,
            parser_class=ShortErrorParser,
            save_config_kwargs={"save_to_log_dir": False},
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

    @classmethod
    def of_data(cls, configs: Sequence[str], options: Sequence[str]) -> PointwiseCLI:
        """Builds what measures data: without a logger, and without callbacks, an export for one."""
        words = list[str]()
        for config in configs:
            words += ["--config", config]
        words += options
        words += ["--trainer.logger", "false", "--trainer.callbacks", "null"]
        return cls(words, run=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--accept_differences",
            action="store_true",
            help="go on where the checkpoint was trained with other settings of the model",
        )

    def _parse_ckpt_path(self) -> None:
        """Lightning's lets a checkpoint win over the configuration; here the two have to agree."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        if self.subcommand:
            settings = self.config[self.subcommand].trainer
            if (
                settings.logger is None
                and not settings.fast_dev_run
                and not settings.barebones
            ):
                # Lightning's depends on what is installed.
                kwargs.setdefault(
                    "logger", CSVLogger(settings.default_root_dir or os.getcwd())
                )
            callbacks = self.config_init[self.subcommand].trainer.callbacks or []
            if not isinstance(callbacks, list):
                callbacks = [callbacks]
            has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
            if not (
                has_bar or settings.barebones or settings.enable_progress_bar is False
            ):
                kwargs.setdefault("callbacks", [*callbacks, RunProgressBar()])
        return super().instantiate_trainer(**kwargs)

    def before_instantiate_classes(self) -> None:
        """A checkpoint is data: unless asked otherwise, none is loaded in a way that runs code."""
        if not self.subcommand:
            return
        config = self.config[self.subcommand]
        path = config.get("ckpt_path")
        # It saves no checkpoint, so another folder changes nothing.
        if self.subcommand != "fit":
            warnings.filterwarnings("ignore", message="The dirpath has changed from")
        if path in ("", "best") or (path == "last" and self.subcommand != "fit"):
            raise TrainingError(
                f"--ckpt_path {path!r} names no file. Give the path of a checkpoint, or leave the "
                "option out."
            )
        if path and os.path.isfile(path) and not config.accept_differences:
            _require_same_settings(path, config.model.as_dict())
        if config.weights_only is None:  # Lightning's own is False for http://….
            config.weights_only = True
        if "verbose" in config:
            config.verbose = False  # Lightning's tables cut names off; another follows.

    def instantiate_classes(self) -> None:
        refused = (ValueError, TypeError, ImportError, RuntimeError)
        command = f"pl-pointwise {self.subcommand}"
        with short_errors(command, refused) if self.subcommand else nullcontext():
            try:
                super().instantiate_classes()
            except Exception as error:
                cause = innermost(error)
                raise cause from cause.__cause__

    def before_fit(self) -> None:
        """``--ckpt_path last`` may be a first start, but not where every run has a new folder."""
        if self.config[self.subcommand].get("ckpt_path") != "last":
            return
        savers: list[Any] = [*self.trainer.checkpoint_callbacks]
        if not any(
            getattr(saver, "dirpath", None) and getattr(saver, "save_last", None)
            for saver in savers
        ):
            raise TrainingError(
                "--ckpt_path last finds no checkpoint. Give its path, or a ModelCheckpoint with "
                "dirpath and save_last: true, in both runs."
            )

    def after_fit(self) -> None:
        """Prints where the run is, and the command that takes it up."""
        trainer: Any = self.trainer
        folder = run_root(trainer)  # Asks all ranks.
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        if isinstance(self.model, PointwiseModule) and self.model.closing is not None:
            page = write_fit_page(
                self.model, trainer, free_path(folder, "report", ".html")
            )
            if page is not None:
                print(f"Curves and the hardest samples: open {short_path(page)}")
        checkpoint = _checkpoint_of(trainer)
        written = f"Written to {short_path(folder)}"
        if checkpoint is None:
            print(f"{written}, without a checkpoint: no ModelCheckpoint saved one.")
            return
        print(f"{written}: log, configuration and checkpoint. Next:\n")
        sources = [
            source for source in (self.datamodule, self.model) if source is not None
        ]
        if any(is_overridden("test_dataloader", source) for source in sources):
            print(f"  {command_for('test', checkpoint, config_in(folder))}")
        elif exports(type(self.model)):
            print(f"  {command_for('export', checkpoint, config_of(checkpoint))}")
        else:
            print(
                f"  define test_dataloader() or export() to go on with {short_path(checkpoint)}"
            )

    def after_predict(self) -> None:
        trainer: Any = self.trainer
        writes = any(
            isinstance(callback, BasePredictionWriter) for callback in trainer.callbacks
        )
        if trainer.is_global_zero and not writes:
            print("Nothing was written: give --trainer.callbacks+ PredictionWriter.")

    def after_test(self) -> None:
        self.after_validate()
        checkpoint = self.config[self.subcommand].get("ckpt_path")
        self._write_test_page(checkpoint)
        if self.trainer.is_global_zero and checkpoint and exports(type(self.model)):
            print(
                f"\nNext:\n\n  {command_for('export', checkpoint, config_of(checkpoint))}"
            )

    def _write_test_page(self, checkpoint: str | None) -> None:
        folder = run_root(self.trainer)  # Asks all ranks.
        writes = self.trainer.is_global_zero and not getattr(
            self.trainer, "fast_dev_run", False
        )
        if not writes or not isinstance(self.model, PointwiseModule):
            return
        model = (
            short_path(checkpoint)
            if checkpoint
            else "as it starts: no --ckpt_path was given"
        )
        path = free_path(folder, "report", ".html")
        samples = samples_measured(self.model)
        page = write_test_page(self.model, self.trainer, path, samples, model)
        if page is not None:
            print(f"Metrics, the hardest samples and answers: open {short_path(page)}")

    def after_validate(self) -> None:
        if not self.trainer.is_global_zero:
            return
        print(
            metrics_table(self.trainer.callback_metrics, samples_measured(self.model))
        )
        if not self.config[self.subcommand].get("ckpt_path"):
            print("Of the model as it starts: no --ckpt_path was given.")


def _require_same_settings(path: str, model: dict[str, Any]) -> None:
    """Refuses a checkpoint of another class or other arguments than the configuration's."""
    stored = hyperparameters(path)
    require_class(
        path, stored.pop("_class_path", ""), resolve_name(model["class_path"])
    )
    changed = []
    for name, (old, new) in differences(stored, model["init_args"]).items():
        changed.append(f"--model.{name} {old!r}, now {new!r}")
    if changed:
        raise TrainingError(
            f"--ckpt_path {path} was trained with {', '.join(changed)}. Give "
            f"{config_option(path)}, or --accept_differences to go on with the settings of now."
        )


def _checkpoint_of(trainer: Any) -> str | None:
    """The checkpoint to go on with: of several callbacks the first that compares any."""
    savers = [
        saver
        for saver in trainer.checkpoint_callbacks
        if isinstance(saver, ModelCheckpoint)
    ]
    savers.sort(key=lambda saver: saver.monitor is None)
    for saver in savers:
        path = saver.best_model_path or saver.last_model_path
        if path:
            return str(path)
    return None


def main(args: Sequence[str] | None = None) -> None:
    """Runs the console script ``pl-pointwise``; ``args`` stands for the command line."""
    from_shell = args is None
    print_in_any_encoding()
    args = list(sys.argv[1:] if args is None else args)
    if "--debug" in args:
        args.remove("--debug")
        # Processes that it starts show everything too.
        os.environ[cli_errors.DEBUG] = "1"
    first = args[0] if args and not args[0].startswith("-") else None
    known = [*PointwiseCLI.subcommands(), *COMMANDS]
    names_a_config = any(word.partition("=")[0] in OPTIONS for word in args)
    trusted = first not in OF_STRANGERS or names_a_config
    # With -P the user says no; with the folder on the path, yes.
    decided = getattr(sys.flags, "safe_path", False) or {"", os.getcwd()}.intersection(
        sys.path
    )
    if from_shell and trusted and not decided:
        own_code.allow_current_folder(args)
    program = f"pl-pointwise {first}" if first in known else "pl-pointwise"
    with short_errors(program, cli_errors.MISTAKES if first in COMMANDS else ()):
        if first in COMMANDS:
            importlib.import_module(f"pl_pointwise.{COMMANDS[first]}").main(args[1:])
            return
        if first is not None and first not in known:
            cli_errors.end(
                program, f"there is no command {first!r}: {', '.join(known)}."
            )
        PointwiseCLI(args)
