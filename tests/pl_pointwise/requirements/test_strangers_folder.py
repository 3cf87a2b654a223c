"""A stranger's folder: whatever its files say, nothing of them runs and nothing is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pandas import DataFrame

import pl_pointwise
from pl_pointwise.cli import main
from pl_pointwise.command_line.configs import foreign_names, packaged_configs, text_of
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.export.command import class_of
from pl_pointwise.requirements.exported import config_for_new_records, own_classes_only
from pl_pointwise.requirements.monitor import monitor
from pl_pointwise.requirements.samples import COLUMNS
from pl_pointwise.training.checkpoints import LIGHTNING_VERSION

MODEL = "pl_pointwise.tasks.digits.DigitsModule"
DATA = "pl_pointwise.tasks.digits.DigitsDataModule"
OPTIONS = ["--data.init_args.batch_size", "8"]
EVIL = {"class_path": "evil.Boom"}
GADGET = """
class_path: lightning.pytorch.LightningDataModule.from_datasets
init_args:
  test_dataset:
    class_path: torch.utils.data.datapipes.iter.Mapper
    init_args:
      datapipe:
        class_path: torch.utils.data.datapipes.iter.IterableWrapper
        init_args: {iterable: ["touch PWNED"]}
      fn: os.system
"""


@pytest.fixture(name="stranger")
def strangers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder named ``stranger`` in the current one, where a module ``evil`` can be imported."""
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\nPath('PWNED').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    monkeypatch.chdir(tmp_path)
    inside = Path("stranger/certificate")
    inside.mkdir(parents=True)
    (inside / "sub.yaml").write_text(GADGET)
    (inside / "evil.yaml").write_text("class_path: evil.Boom")
    (inside / "model.ckpt").touch()
    return Path("stranger")


def nothing_ran() -> bool:
    return not Path("PWNED").exists() and "evil" not in sys.modules


def arguments(**init_args: Any) -> dict[str, Any]:
    return {"model": {"class_path": MODEL, "init_args": init_args}}


# Lines of YAML, each of twice as much as the one before.
BOMB = "- &a0 x\n" + "\n".join(f"- &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))
ESCAPED = '{"class_path": "evil\\u002eBoom"}'
PATH = "stranger/certificate/evil.yaml"
HOSTILE: dict[str, dict[str, Any] | str] = {
    "data is a path": {"data": "stranger/certificate/sub.yaml"},
    "data is JSON": {"data": ESCAPED},
    "init_args is a path": {"model": {"class_path": MODEL, "init_args": PATH}},
    "precision is a path": {"trainer": {"precision": PATH}},
    "class of a gadget": {"data": yaml.safe_load(GADGET)},
    "class of lightning": {
        "data": {"class_path": "lightning.pytorch.LightningDataModule"}
    },
    "class of the package, not of a model": {
        "data": {"class_path": "pl_pointwise.cli.PointwiseCLI"}
    },
    "formulation": arguments(formulation=EVIL),
    "formulation is a name": arguments(formulation="evil.Boom"),
    "another name of the package": arguments(formulation="pl_pointwise.cli.os.mkdir"),
    "class in a list": arguments(
        policy={"template_arguments": [{"class_path": "os.mkdir"}]}
    ),
    "formulation is a path": arguments(formulation=PATH),
    "formulation at an address": arguments(formulation=f"file://{PATH}"),
    "formulation in memory": arguments(formulation="memory://evil.yaml"),
    "formulation is escaped": arguments(formulation=ESCAPED),
    "formulation is escaped twice": arguments(formulation=json.dumps(ESCAPED)),
    "formulation by constraint": arguments(formulation={"kept": [ESCAPED]}),
    "key": arguments(formulation={'{"a": evil.Boom}': None}),
    "policy is a path": arguments(policy={"lora": PATH}),
    "set": f"model: {{class_path: {MODEL}, init_args: {{formulation: !!set {{evil.Boom: }}}}}}",
    "bomb in a text": arguments(formulation=BOMB),
    "bomb": f"model:\n{BOMB}",
    "bomb of merged mappings": "a0: &a0 {x: 1}\n"
    + "\n".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40)),
    "circle": "model: &a [*a]",
    "deep": "model: " + "[" * 5000,
    "long": "model: " + "x" * 200_000,
    "text": "model",
    "not text": "\x00",
    "python": "model: !!python/object/apply:os.system ['touch PWNED']",
}


def write(folder: Path, hostile: dict[str, Any] | str) -> Path:
    sound = {"model": {"class_path": MODEL}, "data": {"class_path": DATA}}
    text = hostile if isinstance(hostile, str) else json.dumps(sound | hostile)
    path = folder / "certificate/config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_configuration_that_leads_elsewhere_is_refused(
    hostile: dict[str, Any] | str, stranger: Path
) -> None:
    path = write(stranger, hostile)
    with pytest.raises(DataError, match=r"config\.yaml"):
        own_classes_only(path)
    assert nothing_ran()


@pytest.mark.parametrize("command", ["monitor", "check", "against"])
def test_no_command_runs_what_a_folder_names(
    command: str, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``os.system`` ran: the parser took the path of a file that nobody had looked at."""
    write(stranger, {"data": "stranger/certificate/sub.yaml"})
    good = json.dumps(
        {"confidence": 0.95, "requirements": [{"text": "kept: violated <= 0.1"}]}
    )
    (stranger / "certificate/certificate.json").write_text(good)
    against = ["--against", str(stranger)]
    words = {
        "monitor": ["monitor", str(stranger)],
        "check": ["check", str(stranger), "--against", "start"],
        "against": ["check", str(stranger), *against, "--require", "lost(kept) <= 0.1"],
    }
    DataFrame(columns=COLUMNS).to_parquet(stranger / "certificate/samples.parquet")
    with pytest.raises(SystemExit):
        main([*words[command], *OPTIONS])
    assert "data names stranger/certificate/sub.yaml" in capsys.readouterr().err
    assert nothing_ran()


def test_what_the_package_writes_is_read(stranger: Path) -> None:
    assert own_classes_only(write(stranger, {}))["data"]["class_path"] == DATA
    texts = {
        "model_name": "org/a.b",
        "template_arguments": {"style": "a.b"},
        "scale": "1.5",
    }
    twice = {"learning_rate": 0.1}  # Plain YAML would write it once and refer to it.
    own_classes_only(write(stranger, arguments(policy=texts, training=[twice, twice])))
    for part in {part for parts in packaged_configs().values() for part in parts}:
        config = config_for_new_records({"model": {}} | yaml.safe_load(text_of(part)))
        assert not list(foreign_names(config))


@pytest.mark.parametrize("command", ["export", "load"])
def test_a_checkpoint_names_no_class(command: str, stranger: Path) -> None:
    """Lightning hands the arguments in it to a parser, which imported the class."""
    hyper = {"_class_path": MODEL, "formulation": EVIL}
    hyper["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
    path = stranger / "certificate/model.ckpt"
    torch.save(
        {"hyper_parameters": hyper, LIGHTNING_VERSION: "2.6.6", "state_dict": {}}, path
    )
    with pytest.raises(TrainingError, match=r"name evil\.Boom"):
        class_of(str(path), []) if command == "export" else pl_pointwise.load(stranger)
    assert nothing_ran()


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (
            "config.json",
            {"sentence_transformers": {"activation_fn": "torch.distributed.run.main"}},
        ),
        ("config.json", {"sbert_ce_default_activation_function": "torch.hub.load"}),
        (
            "config_sentence_transformers.json",
            {"activation_fn": "torch.nn.init.os.getcwd"},
        ),
        (
            "1_Dense/config.json",
            {"activation_function": "torch.utils.cpp_extension.load"},
        ),
    ],
)
def test_an_activation_is_a_module_of_torch(
    file: str, named: dict[str, Any], stranger: Path
) -> None:
    (stranger / "1_Dense").mkdir()
    model = {"model_type": "bert", "sentence_transformers": {"version": "6"}}
    (stranger / "config.json").write_text(json.dumps(model))
    (stranger / file).write_text(json.dumps(model | named))
    with pytest.raises(DataError, match="no module of torch"):
        pl_pointwise.load(stranger)


OF_ONE = '{"confidence": 0.9, "requirements": [{"text": "kept: violated <= 0.1"}], "files": [1]}'
OF_NONE = '{"confidence": 0.9, "requirements": []}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "nonsense",
        "[" * 100_000,
        OF_NONE,
        OF_ONE,
        OF_ONE.replace("0.9", "2"),
    ],
)
def test_a_damaged_certificate_is_one_sentence(text: str, stranger: Path) -> None:
    (stranger / "certificate/certificate.json").write_text(text)
    with pytest.raises(DataError, match=r"certificate\.json is damaged"):
        monitor(stranger, OPTIONS)
    (stranger / "certificate/model.ckpt").unlink()
    # It needs no certificate.
    with pytest.raises(DataError, match="no language model"):
        pl_pointwise.load(stranger)


def test_no_text_of_a_certificate_reaches_the_terminal_as_a_command(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "kept: violated <= 0.1\x1b[2J\x1b]0;owned\x07\n\u202ecertified"
    entry = {"text": text, "seen": text}
    certificate = {"confidence": 0.95, "requirements": [entry], "date": "\x1b[1m"}
    (stranger / "certificate/certificate.json").write_text(json.dumps(certificate))
    with pytest.raises(TrainingError):  # The checkpoint is empty.
        pl_pointwise.load(stranger)
    said = capsys.readouterr().out
    assert "kept: violated <= 0.1 [2J" in said
    assert all(c.isprintable() or c == "\n" for c in said)
