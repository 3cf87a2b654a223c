"""``pl-pointwise export``: the model of a checkpoint as a folder that other libraries load.

    pl-pointwise export --ckpt_path lightning_logs/version_0/checkpoints/epoch=2-step=30.ckpt

The module is built from the arguments in the checkpoint, which is data: of its class path nothing
is imported but what this package ships. The class of a task of one's own is named by ``--config``,
the ``config.yaml`` that ``fit`` wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from ..command_line.cli_errors import CommandParser
from ..command_line.configs import PACKAGE, config_parts, foreign_names, text_of
from ..command_line.next_steps import (
    config_of,
    config_option,
    exports,
    require_class,
    short_path,
)
from ..command_line.own_code import allow_named
from ..errors import TrainingError, printable
from ..lagrangian.declared import known_class
from ..module import PointwiseModule
from ..task import notes_of
from ..training.checkpoints import hyperparameters
from .folder import check_export_folder, replaced_folder


def main(args: Sequence[str]) -> None:
    """Runs the command."""
    parser = CommandParser("export", __doc__)
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument(
        "--output", type=Path, help="the folder; without: export, next to the run's"
    )
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        default=[],
        help="names the class of a task of your own",
    )
    options = parser.parse_args(list(args))
    kind = class_of(options.ckpt_path, options.config)
    if not exports(kind):
        raise TypeError(
            f"{kind.__name__} has no export(): define export(self, path) in it (docs/own_task.md)."
        )
    module = kind.load_from_checkpoint(
        options.ckpt_path, map_location="cpu", weights_only=True
    )
    notes_of(module).checkpoint = Path(options.ckpt_path).name
    config = config_of(options.ckpt_path)
    run = Path(options.ckpt_path).parent if config is None else config.parent
    folder = options.output or run / "export"
    # Before the export, which may take minutes; replaced_folder asks again of the files written.
    check_export_folder(folder)
    with replaced_folder(folder) as whole:
        module.export(whole)
    print(
        f"Exported to {short_path(folder)}: {what_is_in(folder)}, and README.md, its card."
    )


def what_is_in(folder: Path) -> str:
    """What an export holds, in words: an adapter is told as one, with the base that it needs."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return "the model"
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return (
        f"an adapter, which needs its base model {printable(base)} wherever it is loaded "
        "(--model.policy.merge_on_export true in fit exports one whole model)"
    )


def class_of(checkpoint: str, configs: Sequence[str]) -> type[PointwiseModule]:
    """The class of a checkpoint's module: the configurations', or one that this package ships."""
    named = str(hyperparameters(checkpoint).get("_class_path") or "")
    if configs:
        return _class_in_configs(checkpoint, named, configs)
    refuse_foreign_names(checkpoint)
    shipped = known_class(named) if named.partition(".")[0] == PACKAGE else None
    if shipped is not None and issubclass(shipped, PointwiseModule):
        return shipped
    raise TrainingError(
        f"--ckpt_path {checkpoint} is of {printable(named) or 'a class that it does not name'}, "
        f"which {PACKAGE} does not ship, and a checkpoint's own word is not imported. Name the "
        f"class: {config_option(checkpoint)}, or load(…, module_class=YourModule)."
    )


def _class_in_configs(
    checkpoint: str, named: str, configs: Sequence[str]
) -> type[PointwiseModule]:
    """The class that the last configuration with a model names; ``named`` is the checkpoint's."""
    parts = []
    for config in configs:
        parts += config_parts(config)
    # The last one counts, as on the command line.
    for part in reversed(parts):
        model = yaml.safe_load(text_of(part)).get("model")
        allow_named(model)
        path = model.get("class_path") if isinstance(model, Mapping) else model
        if not path:
            continue
        # A name without a module is one of the tasks, as on the command line.
        kind: Any = resolve_name(
            path if "." in str(path) else f"{PACKAGE}.tasks.{path}"
        )
        if not (isinstance(kind, type) and issubclass(kind, PointwiseModule)):
            raise TrainingError(f"--config: the model {path} is no PointwiseModule.")
        require_class(checkpoint, named, kind)
        return kind
    raise TrainingError("--config names no model: class_path of model is not in it.")


def refuse_foreign_names(checkpoint: str | Path) -> None:
    """Refuses a checkpoint whose arguments name what building the module would import."""
    arguments = {**hyperparameters(checkpoint), "_class_path": None}
    for name in foreign_names(arguments):
        raise TrainingError(
            f"{checkpoint}: its arguments name {printable(name)}, which {PACKAGE} does not ship. "
            "If you trust it: pl-pointwise export --config CONFIG, the config.yaml that fit wrote."
        )
