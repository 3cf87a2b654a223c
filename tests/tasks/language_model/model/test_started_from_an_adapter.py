"""A run that starts from an adapter starts from the model that the adapter was trained to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoraConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from pl_pointwise import Optimization, Training
from pl_pointwise.tasks import Lora, Policy, When2CallModule
from pl_pointwise.tasks.common import adapters
from pl_pointwise.tasks.language_model.likelihood.scoring import inference
from pl_pointwise.tasks.language_model.model.loading import (
    load_exported,
    load_language_model,
    load_tokenizer,
)
from tests.tasks.conftest import (
    build_model,
    build_tokenizer,
    move_adapters,
    quiet_trainer,
)

SMALL = Lora(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
FAST = Training(Optimization(learning_rate=0.05))
IDS = torch.arange(3, 43)[None]
CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-5}


def logits(model: Any, reference: bool = False) -> Tensor:
    with inference(model, reference):
        found: Tensor = model(IDS).logits
    return found


def saved(
    folder: Path, architecture: str = "llama", config: Any = None, **overrides: Any
) -> tuple[Path, Tensor]:
    """A folder as PEFT and TRL write it, with no tokenizer, and the logits of its adapter."""
    base = build_model(
        architecture, **{"vocab_size": len(build_tokenizer()), **overrides}
    )
    base.save_pretrained(folder / "base")
    build_tokenizer().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, lora if config is None else config)
    move_adapters(model)
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", logits(model.eval())


def module_of(folder: Path, **options: Any) -> When2CallModule:
    return When2CallModule(Policy(str(folder), lora=SMALL, **options), training=FAST)


@pytest.mark.parametrize(
    "options", [{}, {"merge_on_export": True}, {"continue_adapter": True}]
)
def test_three_runs_one_from_the_others_export(
    options, data, language_model_folder, tmp_path
):
    """Each begins with the answers that the one before ended with, and moves on from them."""
    start, known = language_model_folder, None
    for stage in range(3):
        first = (
            {"continue_adapter": False}
            if stage == 0 and "continue_adapter" in options
            else {}
        )
        module = module_of(start, **options | first)
        if known is not None:
            torch.testing.assert_close(logits(module.model), known, **CLOSE)
            torch.testing.assert_close(
                logits(module.model, reference=True), known, **CLOSE
            )
        quiet_trainer(tmp_path, max_steps=2).fit(module, data)
        before, known = known, logits(module.model)
        if before is not None:
            assert (known - before).abs().max() > 1e-3
            torch.testing.assert_close(
                logits(module.model, reference=True), before, **CLOSE
            )
        start = module.export(tmp_path / f"stage{stage}")
        torch.testing.assert_close(logits(load_exported(str(start))), known, **CLOSE)
        whole = "merge_on_export" in options or (not options and stage == 1)
        assert (start / "config.json").is_file() == whole
    # Over the first base, as any server of adapters takes it.
    if "continue_adapter" in options:
        found = json.loads((start / "adapter_config.json").read_text())
        assert found["base_model_name_or_path"] == str(language_model_folder)
        assert not [path for path in start.iterdir() if path.is_dir()]
        plain = AutoPeftModelForCausalLM.from_pretrained(start)
        torch.testing.assert_close(logits(plain), known, **CLOSE)


EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LORA: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", {}, {"use_dora": True}),
    "rank stabilised": (
        "llama",
        {},
        {"use_rslora": True, "target_modules": "all-linear"},
    ),
    "head": ("llama", {}, {"modules_to_save": ["lm_head"]}),
    "tied embeddings": (
        "llama",
        {"tie_word_embeddings": True},
        {"modules_to_save": ["norm"]},
    ),
    "tied head": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["lm_head"]},
    ),
    "tokens": (
        "llama",
        {"tie_word_embeddings": True},
        {"trainable_token_indices": [5, 6]},
    ),
    "experts": (
        "qwen3_moe",
        EXPERTS,
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("carried_on", [False, True])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_adapters_of_peft_and_trl_start_a_run(name, carried_on, tmp_path) -> None:
    kind, overrides, options = VARIANTS[name]
    folder, expected = saved(tmp_path, kind, LoraConfig(**LORA | options), **overrides)
    module = module_of(folder, continue_adapter=carried_on)
    for reference in (False, True):  # Logits of up to 30, so this is rounding.
        found = logits(module.model, reference)
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)
    move_adapters(module, seed=5)
    assert (logits(module.model) - expected).abs().max() > 0.1
    found = logits(module.model, reference=True)
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)
    again = load_exported(str(module.export(tmp_path / "second")))
    torch.testing.assert_close(
        logits(again), logits(module.model), atol=1e-4, rtol=1e-4
    )


def test_all_weights_are_trained_from_an_adapter(data, tmp_path) -> None:
    folder, expected = saved(tmp_path)
    module = When2CallModule(
        Policy(str(folder), lora=None), objective="simpo", training=FAST
    )
    torch.testing.assert_close(logits(module.model), expected, **CLOSE)
    assert all(weight.requires_grad for weight in module.model.parameters())
    quiet_trainer(tmp_path, max_steps=1).fit(module, data)
    assert (logits(module.model) - expected).abs().max() > 1e-3


def test_an_adapter_of_an_adapter_is_both(tmp_path) -> None:
    first, expected = saved(tmp_path)
    base = load_exported(str(first))
    model = get_peft_model(base, LoraConfig(**LORA))
    move_adapters(model, seed=9)
    model.save_pretrained(tmp_path / "second")
    _edit(tmp_path / "second", base_model_name_or_path=str(first))
    both = logits(model.eval())
    assert (both - expected).abs().max() > 0.1
    torch.testing.assert_close(
        logits(load_language_model(str(tmp_path / "second"))), both, **CLOSE
    )


def test_the_checkpoint_holds_what_is_trained_alone(data, tmp_path) -> None:
    folder, expected = saved(tmp_path)
    module = module_of(folder, continue_adapter=True)
    run = quiet_trainer(tmp_path, max_steps=1)
    run.fit(module, data)
    run.save_checkpoint(tmp_path / "last.ckpt")
    names = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert set(names) == {
        name for name, p in module.named_parameters() if p.requires_grad
    }
    loaded = When2CallModule.load_from_checkpoint(
        tmp_path / "last.ckpt", weights_only=True
    )
    torch.testing.assert_close(logits(loaded.model), logits(module.model), **CLOSE)
    torch.testing.assert_close(logits(loaded.model, reference=True), expected, **CLOSE)


def test_a_vocabulary_that_grew_with_the_adapter_grows_again(tmp_path) -> None:
    """TRL resizes the embeddings for a chat template's tokens, and saves them beside."""
    base = build_model("llama")
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(99)
    options = LORA | {"modules_to_save": ["embed_tokens", "lm_head"]}
    model = get_peft_model(base, LoraConfig(**options))
    move_adapters(model)
    model.save_pretrained(tmp_path / "adapter")
    found = load_language_model(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(found), logits(model.eval()), **CLOSE)


def test_half_precision_is_rounded_once_and_said(tmp_path, monkeypatch) -> None:
    folder, _ = saved(tmp_path)
    said = list[str]()
    monkeypatch.setattr(adapters, "rank_zero_info", said.append)
    wide = load_language_model(Policy(str(folder), dtype="float32")).state_dict()
    half = load_language_model(Policy(str(folder), dtype="bfloat16")).state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    adapter = AutoPeftModelForCausalLM.from_pretrained(folder)
    layer = adapter.get_submodule("base_model.model." + name.removesuffix(".weight"))
    base = layer.get_base_layer().weight.bfloat16().float()
    delta = wide[name] - layer.get_base_layer().weight
    assert torch.equal(half[name], (base + delta).bfloat16())
    first, second = said[:2]
    assert "is loaded with it merged in." in first
    assert "rounded to torch.bfloat16" in second


def test_the_tokenizer_is_the_adapters_or_its_bases(tmp_path) -> None:
    folder, _ = saved(tmp_path)
    known = load_tokenizer(str(folder)).get_vocab()
    assert known == build_tokenizer().get_vocab()
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    assert "<more>" in load_tokenizer(str(folder)).get_vocab()


def test_settings_of_an_adapter_beside_a_merged_model_are_not_read(tmp_path) -> None:
    folder, expected = saved(tmp_path)
    merged = load_exported(str(folder))
    merged.save_pretrained(tmp_path / "merged")
    (tmp_path / "merged/adapter_config.json").write_text(
        (folder / "adapter_config.json").read_text()
    )
    found = load_language_model(str(tmp_path / "merged"))
    torch.testing.assert_close(logits(found), expected, **CLOSE)
    (tmp_path / "merged/adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()
    )
    with pytest.raises(
        ValueError, match=r"has an adapter and the whole model.*Take out"
    ):
        load_language_model(str(tmp_path / "merged"))


def in_hub_cache(cache: Path, name: str, revision: str, folder: Path) -> None:
    """A repository as the hub's client keeps it, of one revision that is no branch."""
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    shutil.copytree(folder, snapshot)


def test_an_adapter_on_the_hub_by_its_revision(tmp_path, monkeypatch) -> None:
    """The base has a revision of its own, which the adapter names."""
    folder, expected = saved(tmp_path)
    cache, own, bases = tmp_path / "cache", "a" * 40, "b" * 40
    _edit(folder, base_model_name_or_path="some/base", revision=bases)
    in_hub_cache(cache, "some/adapter", own, folder)
    in_hub_cache(cache, "some/base", bases, tmp_path / "base")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for continued in (False, True):
        policy = Policy(
            "some/adapter", revision=own, lora=SMALL, continue_adapter=continued
        )
        module = When2CallModule(policy)
        torch.testing.assert_close(logits(module.model), expected, **CLOSE)
        assert module.tokenizer.get_vocab() == build_tokenizer().get_vocab()
    found = json.loads(
        (module.export(tmp_path / "out") / "adapter_config.json").read_text()
    )
    assert (found["base_model_name_or_path"], found["revision"]) == ("some/base", bases)


def _edit(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_is_no_start_is_refused_by_name(language_model_folder, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"continue_adapter: .* is a whole model"):
        module_of(language_model_folder, continue_adapter=True)
    with pytest.raises(ValueError, match=r"continue_adapter: .*lora: none"):
        Policy("any", lora="none", continue_adapter=True)
    folder, _ = saved(tmp_path / "4bit")
    with pytest.raises(ValueError, match=r"4 bits.*continue_adapter"):
        load_language_model(Policy(str(folder), quantize_4bit=True))
    _edit(folder, base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(
        OSError, match=r"is an adapter of .*gone.*base_model_name_or_path"
    ):
        module_of(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(OSError, match=r"no adapter_model\.safetensors.*may run code"):
        load_exported(str(folder))
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    folder, _ = saved(tmp_path / "prompts", config=prompts)
    with pytest.raises(ValueError, match=r"type PROMPT_TUNING writes tokens"):
        module_of(folder)


def test_what_cannot_be_trained_on_is_merged_or_refused(tmp_path) -> None:
    options: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["k_proj"]}
    factors = IA3Config(**options, feedforward_modules=[])
    folder, expected = saved(tmp_path / "ia3", config=factors)
    torch.testing.assert_close(logits(module_of(folder).model), expected, **CLOSE)
    with pytest.raises(ValueError, match=r"type IA3, and a LoRA is trained on"):
        module_of(folder, continue_adapter=True)
    tied = LoraConfig(
        **LORA, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    folder, expected = saved(tmp_path / "tied", config=tied, tie_word_embeddings=True)
    torch.testing.assert_close(logits(module_of(folder).model), expected, **CLOSE)
    with pytest.raises(
        ValueError, match=r"ensure_weight_tying.*Leave continue_adapter out"
    ):
        module_of(folder, continue_adapter=True)


def test_an_adapter_of_another_model_is_refused(tmp_path) -> None:
    """PEFT would warn, and leave its layers without the adapter."""
    folder, _ = saved(tmp_path)
    other = build_model("llama", num_hidden_layers=5, vocab_size=259)
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"adapter.*[Mm]issing"):
        module_of(folder)
