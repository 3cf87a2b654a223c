"""An exported model's folder ``certificate/``, which ``compare --require`` writes.

    certificate.json    the requirements with what they were certified by (answer.py); "files":
                        the SHA-256 of every file of the export but texts for people; "use": what
                        the certification samples were used for (uses.py)
    config.yaml         model, data and precision, without the run's files
    model.ckpt          the trained module
    samples.parquet     what the certification samples measured (samples.py)

And its model on new records, for ``monitor`` and ``check``.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pandas import DataFrame

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.command_line.configs import foreign_names, read_foreign
from pl_pointwise.errors import printable
from pl_pointwise.export.folder import share_modes
from pl_pointwise.export.loading import certificate_in
from pl_pointwise.identity.code import digest_of_code, own_code
from pl_pointwise.identity.files import digest_now, files_of_an_export
from pl_pointwise.identity.models import another_base, bases_of, is_a_base
from pl_pointwise.training.checkpoints import differences, hyperparameters

from .requirement import RequirementError
from .samples import bounds_of, read_samples, samples_of

log = logging.getLogger(__name__)

CERTIFICATE, CHECKPOINT, SAMPLES = "certificate", "model.ckpt", "samples.parquet"
"""The folder in an exported one, the trained module in it, and what it measured."""

START = "start"
"""The predecessor that a model was trained from, instead of a folder."""


def write_certificate(folder: Path, certificate: Mapping[str, Any], run: Path) -> None:
    """Writes ``certificate/`` of a run's files into an exported folder."""
    inside = folder / CERTIFICATE
    inside.mkdir(parents=True)
    for name in (SAMPLES, CHECKPOINT):
        shutil.copy(run / name, inside / name)
    config = config_for_new_records(yaml.safe_load((run / "config.yaml").read_text()))
    # As YAML would write what stands twice as an alias.
    config = json.loads(json.dumps(config))
    (inside / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    share_modes(folder)
    files = {
        name: digest_now(folder / name) for name in sorted(files_of_an_export(folder))
    }
    whole = {**certificate, "date": date.today().isoformat(), "files": files}
    (inside / "certificate.json").write_text(json.dumps(whole, indent=1))


def read_certificate(
    folder: str | Path, others: bool = True, besides: Collection[Path] = ()
) -> tuple[dict[str, Any], DataFrame]:
    """Returns the certificate, and the table of samples.py that it was made by.

    others, besides: whether a file that it does not list is refused, and which is not.
    """
    path = Path(folder) / CERTIFICATE / SAMPLES
    certificate = certificate_in(Path(folder), others, besides)
    try:
        return certificate, read_samples(path)
    except (OSError, ValueError, KeyError) as error:  # pyarrow's are of both.
        raise RequirementError(
            f"{path}: {printable(error)}. Export the model again."
        ) from None


def measure_new_records(
    folder: str | Path,
    options: Sequence[str],
    configs: Sequence[str] = (),
    trained: bool = True,
    own_arguments: bool = True,
) -> tuple[DataFrame, dict[str, str]]:
    """Returns the table of samples.py of new records, by a forward pass of the exported model, and
    the bounds that its violations are measured by.

    Args:
        folder: the exported model's, of which :func:`read_certificate` has read the certificate.
        options: of LightningCLI, which say where the records are:
            ``["--data.init_args.test_file", "new.jsonl"]``.
        configs: names or paths, instead of the folder's configuration: their classes are imported.
        trained: False for the model that it was trained from.
        own_arguments: whether the configuration has to be its own. Of two models that are measured
            by one, the other may have been trained by another method.
    """
    inside = Path(folder) / CERTIFICATE
    if not any(option.startswith("--data") for option in options):
        raise RequirementError(
            "Say where the new records are: --data.init_args.test_file new.jsonl, or what the "
            "data module calls its test data."
        )
    # The folder's own word is data: nothing is imported that this package does not ship.
    if not configs:
        configs = [yaml.safe_dump(own_classes_only(inside / "config.yaml"))]
    cli = PointwiseCLI.of_data(configs, options)
    require_certified_parts(Path(folder), cli, own_arguments)
    return samples_by(cli, inside / CHECKPOINT if trained else None), bounds_of(
        cli.model
    )


def require_certified_parts(
    folder: Path, cli: PointwiseCLI, own_arguments: bool
) -> None:
    """Refuses what is not the model that was certified, though its weights are: another base under
    it, other bounds or arguments than those on record. Says where code of one's own is another.
    """
    certificate = certificate_in(folder, others=False)
    bounds = bounds_of(cli.model)
    # Which earlier versions did not write.
    certified_bounds = certificate.get("bounds")
    if certified_bounds and certified_bounds != bounds:
        raise RequirementError(
            f"{folder} was certified by the bounds {certified_bounds}, and the configuration "
            f"gives {bounds}. Give its own: --config {folder / CERTIFICATE / 'config.yaml'}"
        )
    # Of two models under one configuration only one can have its own: see below.
    if own_arguments:
        _require_own_arguments(folder, cli)
    now = bases_of(cli.config_dump.get("model"))
    for name, digest in (certificate.get("base") or {}).items():
        if not is_a_base(digest, now.values()):
            raise RequirementError(another_base(folder, name))
    code = digest_of_code(own_code([cli.model, cli.datamodule]))
    if certificate.get("code") not in (None, code):
        log.warning(
            "%s was certified with other source files of your own task: what is said of it is of "
            "the code that is here now.",
            folder,
        )


def _require_own_arguments(folder: Path, cli: PointwiseCLI) -> None:
    """Refuses arguments of the module that are not those of the certified checkpoint."""
    stored = hyperparameters(str(folder / CERTIFICATE / CHECKPOINT))
    stored.pop("_class_path", None)
    arguments = cli.config.model.as_dict()["init_args"]
    for name, (old, new) in differences(stored, arguments).items():
        # Where the base lies may differ; what it is has a digest.
        if name.rpartition(".")[2] in ("model_name", "revision"):
            continue
        raise RequirementError(
            f"{folder} was certified with --model.{name} {printable(old, 80)}, and the "
            f"configuration gives {printable(new, 80)}. Give its own: --config "
            f"{folder / CERTIFICATE / 'config.yaml'}"
        )


def samples_by(
    cli: PointwiseCLI, checkpoint: Path | None, selection: bool = False
) -> DataFrame:
    """Returns the table of samples.py of a model's test data, with ``selection`` of its validation
    data too, by a forward pass. Without a checkpoint it has the weights that it starts with.
    """
    options: dict[str, Any] = {
        "ckpt_path": checkpoint,
        "weights_only": True,
        "verbose": False,
    }
    trainer: Any = cli.trainer
    if selection:
        trainer.limit_val_batches = 1.0  # 0 is for the fit.
        trainer.validate(cli.model, cli.datamodule, **options)
    trainer.test(cli.model, cli.datamodule, **options)
    return samples_of(cli.model)


def own_classes_only(path: Path) -> dict[str, Any]:
    """Returns model, data and precision; refuses classes that this package does not ship, and what
    the parser would read from elsewhere.
    """
    content = read_foreign(path)
    for part in ("model", "data", "trainer"):
        value = content.get(part) or {}
        if not isinstance(value, dict):  # Of a text the parser would go on elsewhere.
            raise _not_shipped(path, part, value)
    config = config_for_new_records(content)
    for part, value in config.items():
        for name in foreign_names(value):
            raise _not_shipped(path, part, name)
    return config


def _not_shipped(path: Path, part: str, name: Any) -> RequirementError:
    return RequirementError(
        f"{path}: {part} names {printable(name, 80)}, which pl_pointwise does not ship, and a "
        "folder's own word is not imported or followed. Read the file; if you trust it: --config "
        f"{path}"
    )


def config_for_new_records(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns model, data and precision of a run's configuration, without the run's files."""
    data: Any = config.get("data")
    arguments = data.get("init_args") if isinstance(data, dict) else None
    if isinstance(arguments, dict):
        arguments = dict(arguments)
        for name in arguments:
            # Its own files trained, selected and certified it; new records are named by options.
            if name.endswith(("_file", "hub_path")):
                arguments[name] = None
        # What the hub has is known to the model as well.
        if "source" in arguments:
            arguments["source"] = "files"
        data = {**data, "init_args": arguments}
    precision = (config.get("trainer") or {}).get("precision")
    return {
        "model": config.get("model"),
        "data": data,
        "trainer": {"precision": precision},
    }
