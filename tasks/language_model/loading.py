"""Loading a causal language model for fine-tuning with LoRA, and a tokenizer that can chat.

Any model that ``AutoModelForCausalLM`` knows loads, from a folder or the hub, from safetensors
only and without running code that comes with it. What would go wrong later is refused here: no
target for the adapters, a missing quantisation package, a tokenizer without an end token or whose
chat template loses the tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pl_pointwise.tasks.common.dropout import RedrawnDropout, use_quick_dropout
from pl_pointwise.tasks.common.models import loading, model_source

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]


@dataclass
class Lora:
    """Low-rank adapters: W + (lora_alpha / r)·B·A beside chosen linear layers W.

    The options are PEFT's, of the same names, and are handed to its LoraConfig as they are.

    Args:
        r: rank of B·A.
        lora_alpha: scale, divided by r.
        lora_dropout: on the adapters' input.
        target_modules: names of the layers, by their endings; "all-linear" for every linear layer
            but the vocabulary's, another text for a regular expression; None takes PEFT's default
            for the architecture (for Llama the query and value projections).
        modules_to_save: names of layers that are trained as a whole.
        use_rslora: divide the scale by √r instead of r.
        use_dora: train the norms of the columns of W as well.
    """

    r: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False


def load_language_model(
    name: str,
    *,
    lora: Lora | None = None,
    dtype: Dtype = "auto",
    attention: Attention | None = None,
    quantize_4bit: bool = False,
    gradient_checkpointing: bool = False,
    revision: str | None = None,
) -> PreTrainedModel | PeftModel:
    """A causal language model, with fresh adapters if asked for; then only they are trainable.

    Args:
        name: a folder, a name on the hub, or ``package:NAME/FOLDER``.
        lora: adapters to add, in float32 even on a base in half precision. With them off the model
            is the reference policy.
        dtype: of the base's weights; "auto" is that of the files.
        attention: None is transformers' choice for the model, as a rule sdpa.
        quantize_4bit: hold the base in 4 bits (NF4, computing in bfloat16); needs bitsandbytes.
        gradient_checkpointing: compute each layer again in the backward pass instead of keeping
            its activations.
        revision: of a model on the hub.
    """
    quantization = _four_bits() if quantize_4bit else None
    with loading(name):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_source(name),
            revision=revision,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention,
            quantization_config=quantization,
            use_safetensors=True,
            trust_remote_code=False,
        )
    return prepare_for_training(
        model,
        lora,
        gradient_checkpointing=gradient_checkpointing,
        quantized=quantize_4bit,
    )


def prepare_for_training(
    model: PreTrainedModel,
    lora: Lora | None,
    *,
    gradient_checkpointing: bool = False,
    quantized: bool = False,
) -> PreTrainedModel | PeftModel:
    """Adapters and gradient checkpointing on a model that is already there."""
    if quantized:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if gradient_checkpointing:
        # Renamed in newer versions of transformers. Non-reentrant, as the other kind loses the
        # gradient where a layer's input needs none.
        older = getattr(model, "gradient_checkpointing_enable", None)
        enable = getattr(model, "activation_checkpointing_enable", older)
        assert enable is not None
        enable({"use_reentrant": False})
    return model if lora is None else add_lora(model, lora)


def add_lora(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """The model with fresh adapters, the base frozen.

    Raises:
        ValueError: nothing in the model can take them; names what could.
    """
    config = LoraConfig(task_type="CAUSAL_LM", **asdict(lora))
    kind = model.config.model_type
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        if lora.target_modules is None and "target_modules" in str(error):
            problem = f'PEFT has no default LoRA targets for the architecture "{kind}"'
        elif lora.target_modules is not None and "not found" in str(error):
            problem = f'no LoRA target {lora.target_modules} in this "{kind}" model'
        else:
            raise
        endings = sorted(
            {
                path.rpartition(".")[2]
                for path, module in model.named_modules()
                if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
            }
        )
        raise ValueError(
            f"{problem}. Set target_modules; its linear layers are {endings}."
        ) from error
    assert isinstance(adapted, PeftModel)
    use_quick_dropout(adapted, RedrawnDropout)
    return adapted


def merged_weights(model: PeftModel) -> dict[str, Tensor]:
    """The weights of the model without its adapters, which are merged into it.

    By the names of the model they were added to, in its dtype, on the CPU. The model itself stays
    as it is, as merging in place and back would round its weights: each layer is merged in a copy.
    """
    base, adapter = model.get_base_model(), model.active_adapter
    layers = {name: part for name, part in base.named_modules() if isinstance(part, LoraLayer)}
    merged = {}
    for name, weight in base.state_dict().items():
        if any(name.startswith(f"{layer}.") for layer in layers) or ".original_module." in name:
            continue
        merged[name.replace(f".modules_to_save.{adapter}.", ".")] = weight.cpu()
    for name, layer in layers.items():
        layer = deepcopy(layer)
        layer.merge(adapter_names=[adapter])
        for key, weight in layer.get_base_layer().state_dict().items():
            merged[f"{name}.{key}"] = weight.cpu()
    return merged


def load_tokenizer(
    name: str,
    *,
    tools: bool = False,
    revision: str | None = None,
    chat_template: str | None = None,
    default_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, fit for conversations; see :func:`check_tokenizer`.

    Args:
        name: of the model.
        tools: also ask that the chat template show tools.
        revision: on the hub.
        chat_template: instead of the tokenizer's own: a template, or the path of one that ends in
            ".jinja".
        default_template: where the tokenizer has none and none is given.
    """
    with loading(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_source(name), revision=revision, trust_remote_code=False
        )
    if chat_template is not None and chat_template.endswith(".jinja"):
        chat_template = Path(chat_template).read_text(encoding="utf-8")
    tokenizer.chat_template = chat_template or tokenizer.chat_template or default_template
    check_tokenizer(tokenizer, tools=tools)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> None:
    """Refuse a tokenizer that cannot render a conversation that ends.

    Args:
        tools: also ask that the chat template show the tools it is given.

    Raises:
        ValueError: no end token, no chat template, or a template that ignores tools.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {name} has no end token, so no response would ever end. Set its "
            "eos_token to the token that closes an answer in the model's format."
        )
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer {name} has no chat template. Take the instruction-tuned model's, or "
            "set tokenizer.chat_template."
        )
    if not tools:
        return
    probe = "probe_of_tool_support"
    if probe not in _render(tokenizer, [_tool(probe)]):
        raise ValueError(
            f"The chat template of {name} ignores the tools it is given, so the model would never "
            "see them. Use a model trained to call tools, or a template that renders them."
        )


def _render(tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]) -> str:
    """A short conversation with these tools, as text."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}],
        tools=list(tools),
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(rendered, str)
    return rendered


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
    function = {"name": name, "description": "A test.", "parameters": parameters}
    return {"type": "function", "function": function}


def _four_bits() -> BitsAndBytesConfig:
    if find_spec("bitsandbytes") is None:
        raise ImportError(
            "A base in 4 bits needs bitsandbytes: pip install 'pl-pointwise[qlora]', or set "
            "quantize_4bit to false."
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
