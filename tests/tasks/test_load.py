"""``pl_pointwise.load``: what was exported, in one line, with its certificate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder

import pl_pointwise
from pl_pointwise import Pointwise
from pl_pointwise.errors import DataError
from pl_pointwise.identity.files import digest_now
from pl_pointwise.identity.models import bases_of
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.loading import Policy
from pl_pointwise.tasks.reranker.module import RerankerModule
from pl_pointwise.tasks.safety.module import SafetyModule
from tests.tasks.conftest import move_adapters
from tests.tasks.reranker.conftest import save_tiny_cross_encoder

CERTIFICATE = {
    "confidence": 0.95,
    "date": "2026-11-23",
    "requirements": [
        {"text": "refuse: violated <= 0.1", "seen": "6 of 300 samples fail"}
    ],
}


@pytest.mark.parametrize("merged", [True, False])
def test_a_language_model_gives_what_the_module_gives(
    merged: bool,
    language_model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lora = Lora(r=2, target_modules="all-linear")
    policy = Policy(str(language_model_folder), lora=lora, merge_on_export=merged)
    module = SafetyModule(policy, Pointwise())
    move_adapters(module)
    folder = module.export(tmp_path / "model")
    (folder / "certificate").mkdir()
    files = {each.name: digest_now(each) for each in folder.iterdir() if each.is_file()}
    (folder / "certificate/certificate.json").write_text(
        json.dumps(CERTIFICATE | {"files": files})
    )
    model, tokenizer = pl_pointwise.load(folder)
    said = capsys.readouterr().out
    assert "certificate.json says, with 95 % confidence, since 2026-11-23" in said
    assert "refuse: violated <= 0.1: 6 of 300 samples fail\n" in said
    assert "check and monitor measure whether" in said
    assert tokenizer.chat_template == module.tokenizer.chat_template
    ids = torch.tensor([tokenizer("a b c")["input_ids"]])
    with torch.no_grad():
        expected = module.model.eval()(ids).logits
        torch.testing.assert_close(model(ids).logits, expected)
        with module.model.disable_adapter():
            assert (module.model(ids).logits - expected).abs().max() > 0.1
    assert bool(list(folder.glob("model*.safetensors"))) == merged
    # Not PEFT's, which names the base's folder.
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == ("transformers" if merged else "peft")
    assert card.data.pipeline_tag == "text-generation"
    assert str(language_model_folder) not in str(card)
    assert "| refuse | ≥ " in card.text
    assert "| comply | ≤ " in card.text


def test_a_re_ranker_is_a_cross_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = RerankerModule(
        str(save_tiny_cross_encoder(tmp_path / "base")), max_length=32
    )
    module.export(tmp_path / "model")
    found = pl_pointwise.load(tmp_path / "model")
    assert isinstance(found, CrossEncoder)
    assert "no certificate" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_no_name_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        pl_pointwise.load(tmp_path / "model")


@pytest.fixture
def adapter(language_model_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A base of its own, and an adapter on it that is certified."""
    base = tmp_path / "base"
    shutil.copytree(language_model_folder, base)
    policy = Policy(str(base), lora=Lora(r=2, target_modules="all-linear"))
    module = SafetyModule(policy, Pointwise())
    move_adapters(module)
    folder = module.export(tmp_path / "model")
    (folder / "certificate").mkdir()
    files = {each.name: digest_now(each) for each in folder.iterdir() if each.is_file()}
    bases = bases_of({"policy": {"model_name": str(base)}})
    certificate = CERTIFICATE | {"files": files, "base": bases}
    (folder / "certificate/certificate.json").write_text(json.dumps(certificate))
    return base, folder


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json", "gone"])
def test_another_base_under_an_adapter_is_refused(
    name: str, adapter: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights × 300 in the same folder gave other logits, and no word."""
    base, folder = adapter
    pl_pointwise.load(folder)
    if name == "gone":
        shutil.rmtree(base)
    elif name == "model.safetensors":
        tensors = load_file(base / name)
        save_file(
            {key: 300 * each for key, each in tensors.items()},
            base / name,
            {"format": "pt"},
        )
    else:
        (base / name).write_text((base / name).read_text() + " ")
    with pytest.raises(
        DataError, match=r"its base model .* is not here, or not the one"
    ):
        pl_pointwise.load(folder)


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_an_adapter_that_lacks_tensors_is_refused(
    kept: float, adapter: tuple[Path, Path]
) -> None:
    """Without a certificate, which lists the file, the base alone was given."""
    _, folder = adapter
    shutil.rmtree(folder / "certificate")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(dict(list(tensors.items())[: int(kept * len(tensors))]), path)
    with pytest.raises(ValueError, match="missing adapter keys"):
        pl_pointwise.load(folder)
