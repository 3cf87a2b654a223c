"""A tiny tokenizer and tiny causal language models, built on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}{{ '<|end|>\\n' }}{%- endif %}
{%- for message in messages %}{{ '<|start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' }}
{{- (call.function or call) | tojson }}{{ '</tool_call>' }}{%- endfor %}
{{- '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{%- endif %}"""

VOCABULARY = 97  # of models that need no tokenizer; divides nothing


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, so any text has a known length; a chat template with tools and calls."""
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """A configuration of three narrow layers and no dropout; windows are shorter than prompts."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    alternating = ["sliding_attention", "full_attention", "sliding_attention"]
    kinds: dict[str, Callable[[], PreTrainedConfig]] = {
        "llama": lambda: LlamaConfig(**sizes | overrides),
        "qwen2": lambda: Qwen2Config(**sizes | overrides),
        "mistral": lambda: MistralConfig(**sizes | {"sliding_window": 7} | overrides),
        "phi3": lambda: Phi3Config(**sizes | {"sliding_window": 7} | overrides),
        "gemma2": lambda: Gemma2Config(
            **sizes
            | {"head_dim": 16, "sliding_window": 6, "final_logit_softcapping": 3.0}
            | overrides
        ),
        "gemma3": lambda: Gemma3TextConfig(
            **sizes
            | {"head_dim": 16, "sliding_window": 6, "layer_types": alternating}
            | {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}
            | overrides
        ),
        "granite": lambda: GraniteConfig(**sizes | {"logits_scaling": 0.3} | overrides),
        "cohere": lambda: CohereConfig(**sizes | {"logit_scale": 2.5} | overrides),
        # without what the shared prompt needs: ALiBi, and convolution between tokens
        "bloom": lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        "lfm2": lambda: Lfm2Config(
            **sizes | {"layer_types": ["conv", "full_attention", "conv"]} | overrides
        ),
    }
    return kinds[architecture]()


def build_model(
    architecture: str, attention: str | None = None, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Random weights large enough for attention and likelihoods to be far from uniform."""
    torch.manual_seed(seed)
    config = build_config(architecture, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15)
    return model


def adapt(model: PreTrainedModel, seed: int = 1, **options: Any) -> PeftModel:
    """LoRA on every linear layer, away from its zero start, so that policy and reference differ."""
    torch.manual_seed(seed)
    options = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8} | options
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return adapted


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, an end token, a chat template that renders tools and tool calls."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    """make_model(architecture, attention=None, seed=0, **config) → a tiny causal language model."""
    return build_model


@pytest.fixture(scope="session")
def make_adapted() -> Callable[..., PeftModel]:
    """make_adapted(model, seed=1, **lora) → the model with adapters that are not zero."""
    return adapt


@pytest.fixture(scope="session")
def language_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its tokenizer, as ``from_pretrained`` reads it."""
    folder = tmp_path_factory.mktemp("language_model")
    tokenizer = build_tokenizer()
    build_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
