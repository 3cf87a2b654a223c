"""All weights are trained: the reference is the model as it was, and nothing moves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from transformers import AutoModelForCausalLM

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.tasks import Policy, SafetyModule, When2CallDataModule, When2CallModule
from pl_pointwise.tasks.language_model.adapters import Lora
from pl_pointwise.tasks.language_model.frozen import frozen_reference
from pl_pointwise.tasks.language_model.reference import adapters_off, base_fingerprint
from tests.tasks.conftest import (
    build_model,
    build_tokenizer,
    make_data,
    make_module,
    move_adapters,
    quiet_trainer,
    random_batch,
)
from tests.tasks.when2call.conftest import preference_rows, write_rows

FAST = Training(Optimization(learning_rate=1e-3))
METHODS = ["plain", "chunked", "shared_prompt"]


def made(folder: Path, **options: Any) -> When2CallModule:
    return make_module(When2CallModule, folder, FAST, False, **{"lora": None} | options)


def batch_of() -> dict[str, Any]:
    return random_batch((5, 9, 7), ((4, 6, 3), (2, 8), (7, 3, 5)))


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Six training prompts and two held-out ones."""
    rows = preference_rows(8)
    return {
        "train_file": str(write_rows(tmp_path / "train.jsonl", rows[:12])),
        "val_file": str(write_rows(tmp_path / "val.jsonl", rows[12:])),
    }


def data_of(files: dict[str, str]) -> When2CallDataModule:
    return make_data(When2CallDataModule, None, files, group_rejected=True, batch_size=4)


@pytest.fixture(params=["untied", "tied"])
def folder(request, tmp_path) -> Path:
    """A tiny Llama whose head is a weight of its own, or that of its embeddings."""
    tokenizer = build_tokenizer()
    tied = request.param == "tied"
    model = build_model("llama", vocab_size=len(tokenizer), tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def two_models(module: When2CallModule, folder: Path, batch: dict[str, Any]) -> tuple[Any, Any]:
    """KL and s of the first response by two models beside each other, and the gradient of both."""
    policy = AutoModelForCausalLM.from_pretrained(folder)
    policy.load_state_dict(module.model.state_dict())
    reference = AutoModelForCausalLM.from_pretrained(folder)
    length, size = int(batch["prompt_lengths"][0]), int(batch["response_lengths"][0, 0])
    response = batch["response_ids"][0, 0, :size]
    ids = torch.cat([batch["prompt_ids"][0, :length], response])[None]
    here = policy(ids).logits[0, length - 1 : -1].log_softmax(-1)
    there = reference(ids).logits[0, length - 1 : -1].log_softmax(-1).detach()
    kl = (here.exp() * (here - there)).sum(-1).mean()
    (kl + here.gather(1, response[:, None]).sum()).backward()
    return kl, {name: weight.grad for name, weight in policy.named_parameters()}


@pytest.mark.parametrize("chunk", [64, 2**23])
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_are_those_of_two_models(method, chunk, folder) -> None:
    """chunk: so few logits that every position is a chunk, computed again in the backward pass."""
    module, batch = made(folder, scoring_method=method), batch_of()
    module.scorer.chunk_elements = chunk
    move_adapters(module)
    outputs = module(batch)
    (outputs.kl[0, 0] + outputs.log_likelihood[0, 0]).backward()
    kl, gradients = two_models(module, folder, batch)
    assert kl > 0.1
    torch.testing.assert_close(outputs.kl[0, 0], kl, rtol=1e-4, atol=1e-5)
    for name, weight in module.model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_under_autocast_policy_and_reference_keep_their_own_weights(method, folder) -> None:
    """Autocast remembers a weight's copy in bfloat16 by the weight's identity."""
    module, batch = made(folder, scoring_method=method), batch_of()
    move_adapters(module)
    exact = module(batch)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = module(batch)
        outputs.kl.sum().backward()
    for found, expected in (
        (outputs.kl, exact.kl),
        (outputs.mean_log_likelihood, exact.mean_log_likelihood),
        (outputs.reference_mean_log_likelihood, exact.reference_mean_log_likelihood),
    ):
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05)
    assert all(p.grad is not None and p.grad.any() for p in module.model.parameters())


def reference_values(module: When2CallModule, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return module(batch).reference_log_likelihood


def test_training_moves_every_weight_and_not_the_reference(folder, files, tmp_path) -> None:
    module, batch = made(folder, formulation=Pointwise(alpha=1.0)), batch_of()
    before = {name: weight.clone() for name, weight in module.model.state_dict().items()}
    reference, fingerprint = reference_values(module, batch), base_fingerprint(module.model)
    run = quiet_trainer(tmp_path, max_epochs=2)
    run.fit(module, data_of(files))
    assert all((w != before[name]).any() for name, w in module.model.state_dict().items())
    assert module.multipliers["rejected"].max() > 0
    torch.testing.assert_close(reference_values(module, batch), reference, rtol=1e-6, atol=1e-5)
    assert base_fingerprint(module.model) == fingerprint
    with adapters_off(module.model):
        for name, weight in module.model.state_dict().items():
            assert torch.equal(weight, before[name]), name
    assert module(batch).kl.mean() > 1e-3
    prompts, lengths = batch["prompt_ids"], batch["prompt_lengths"]
    other = made(folder)
    assert (
        module.generate(prompts, lengths, reference=True).ids
        == other.generate(prompts, lengths).ids
    )


def test_the_checkpoint_holds_all_weights_and_the_reference_is_read_again(
    folder, files, tmp_path
) -> None:
    module, batch = made(folder, formulation=Pointwise(alpha=1.0)), batch_of()
    run = quiet_trainer(tmp_path, max_epochs=1)
    run.fit(module, data_of(files))
    run.save_checkpoint(tmp_path / "last.ckpt")
    loaded = When2CallModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    for name, weight in module.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    expected = reference_values(module.eval(), batch)
    torch.testing.assert_close(reference_values(loaded.eval(), batch), expected)
    state = {name: w for name, w in module.state_dict().items() if "o_proj" not in name}
    with pytest.raises(RuntimeError, match=r"missing model.*o_proj"):
        loaded.load_state_dict(state)


@pytest.mark.parametrize("kind", [When2CallModule, SafetyModule])
def test_the_export_is_a_plain_model(kind, folder, tmp_path) -> None:
    module = make_module(kind, folder, FAST, True, lora=None)
    path = module.export(tmp_path / "export")
    assert not list(path.glob("adapter*"))
    loaded = AutoModelForCausalLM.from_pretrained(path, use_safetensors=True).eval()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, module.eval().model(ids).logits)
    assert "AutoModelForCausalLM" in (path / "README.md").read_text()


@pytest.mark.parametrize(
    ("folder", "where"), [("untied", "memory"), ("tied", "disk")], indirect=["folder"]
)
def test_a_cache_takes_the_place_of_the_copy(where, folder, files, tmp_path) -> None:
    """Filled before the first step, from when on the weights are no longer the reference's."""
    found = []
    for cache in (None, "memory" if where == "memory" else str(tmp_path / "cache")):
        seed_everything(0)
        module = made(folder, formulation=Pointwise(alpha=1.0), reference_cache=cache)
        run = quiet_trainer(tmp_path, max_epochs=2)
        run.fit(module, data_of(files))
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
        frozen, whole = frozen_reference(module.model), sum(p.nbytes for p in module.parameters())
        assert frozen is not None
        assert frozen.loads == 1  # Validation has not read it again.
        assert (frozen.size < 0.3 * whole) == (cache is not None)
    assert module.scorer.cache is not None
    assert (
        module.scorer.cache.misses == 0
    )  # Counted anew each epoch; it was filled before the first.
    # Kept in bfloat16; a gradient may be near 0, where AdamW steps by its sign.
    torch.testing.assert_close(found[0], found[1], atol=5e-3, rtol=0)
    batch = batch_of()  # Of another data set: the copy is read again.
    expected = made(folder)(batch).log_likelihood
    torch.testing.assert_close(reference_values(module, batch), expected, atol=0.1, rtol=0.01)


def test_nothing_is_kept_for_a_loss_without_a_reference(
    language_model_folder, files, tmp_path
) -> None:
    module = made(language_model_folder, objective="simpo")
    quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, data_of(files))
    frozen = frozen_reference(module.model)
    assert frozen is not None
    assert (frozen.loads, frozen.size) == (0, 0)


def test_weights_of_half_precision_files_are_trained_in_float32(tmp_path) -> None:
    tokenizer = build_tokenizer()
    build_model("llama", vocab_size=len(tokenizer)).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert {p.dtype for p in made(tmp_path).model.parameters()} == {torch.float32}
    with pytest.warns(UserWarning, match="lost in rounding.*bf16-mixed"):
        half = made(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert made(tmp_path, lora=Lora()).model.get_base_model().dtype == torch.bfloat16


def test_the_command_line_can_ask_for_it(language_model_folder) -> None:
    arguments = ["--config", "when2call", "--model.policy.model_name", str(language_model_folder)]
    arguments += ["--data.source", "files", "--data.train_file", "no.jsonl"]
    arguments += ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    arguments += ["--model.policy.lora", "none", "--trainer.precision", "32-true"]
    module = PointwiseCLI(arguments, run=False).model
    assert module.lora is None
    assert all(p.requires_grad for p in module.model.parameters())


def test_four_bits_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match=r"lora=null: weights of 4 bits.*quantize_4bit"):
        Policy("any", lora=None, quantize_4bit=True)
