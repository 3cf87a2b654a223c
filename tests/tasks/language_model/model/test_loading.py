"""A causal language model loads ready for fine-tuning, or says what is missing before it trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.loading import Policy, load_language_model
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from tests.tasks.conftest import build_tokenizer


def test_only_the_adapters_are_trained_and_they_are_float32(language_model_folder: Path) -> None:
    model = load_language_model(Policy(str(language_model_folder), dtype="bfloat16"), Lora(r=4))
    assert isinstance(model, PeftModel)
    for name, weight in model.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        assert weight.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
    trained = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}  # PEFT's default for Llama


def test_without_lora_it_is_the_plain_model(language_model_folder: Path) -> None:
    model = load_language_model(Policy(str(language_model_folder), attention="eager"))
    assert type(model) is LlamaForCausalLM
    assert model.config._attn_implementation == "eager"
    assert model.dtype == torch.float32  # that of the files


def test_gradient_checkpointing_keeps_the_gradient(language_model_folder: Path) -> None:
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = Policy(str(language_model_folder), gradient_checkpointing=checkpointing)
        model = load_language_model(policy, Lora(lora_dropout=0.0)).train()
        base = model.get_base_model()  # Renamed in newer versions of transformers.
        flags = ("is_activation_checkpointing", "is_gradient_checkpointing")
        assert any(getattr(base, flag, False) for flag in flags) == checkpointing
        model(input_ids=torch.arange(3, 20)[None]).logits.square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert max(gradient.abs().max() for gradient in grads[0].values()) > 1e-5
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="it is there")
def test_four_bits_without_the_package_say_what_to_install(language_model_folder: Path) -> None:
    with pytest.raises(ImportError, match="bitsandbytes"):
        load_language_model(Policy(str(language_model_folder), quantize_4bit=True))


def test_a_tokenizer_without_an_end_token_or_a_chat_template_is_refused() -> None:
    for missing, name in (("eos_token", "end token"), ("chat_template", "chat template")):
        tokenizer = build_tokenizer()
        setattr(tokenizer, missing, None)
        with pytest.raises(DataError, match=f"no {name}"):  # one sentence on the command line
            ConversationEncoder(tokenizer)
