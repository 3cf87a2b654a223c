"""LoRA adapters: PEFT's options, where they go by default, adapters already trained, merging."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from pl_pointwise.errors import UnsupportedError, one_of
from pl_pointwise.tasks.common.models import model_source

from ..likelihood.vocabulary import decoder_of

ATTENTION = "attention"
_LINEAR = (nn.Linear, Conv1D)
_OTHERS = re.compile("Router|GroupedLinear")


@dataclass
class Lora:
    """Low-rank adapters: W + (lora_alpha / r)·B·A on chosen linear layers W.

    PEFT's options under its names; PEFT's documentation says what each does. Those that train or
    replace W itself are refused, as W is the reference.

    Args:
        r: rank of B·A.
        lora_alpha: scale, divided by r.
        lora_dropout: on the adapters' input.
        target_modules: names of the layers, by their endings; "attention" for every linear layer of
            attention, whatever its name; "all-linear" for every linear layer but the vocabulary's;
            another text for a regular expression. None takes PEFT's default for the architecture
            (for Llama the query and value projections), and "attention" where PEFT has none.
        modules_to_save: names of layers that are trained as a whole.
        use_rslora: divide by √r instead of r.
        layers_to_transform: numbers of the layers that get adapters; None is all.
        target_parameters: weights that are no linear layer's, such as "mlp.experts.gate_up_proj" of
            experts; needs lora_dropout 0.
        peft: more options of PEFT's ``LoraConfig``, such as {use_dora: true}.
    """

    r: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    peft: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Adapters that wait for tokens in the prompt are not shown them by the scorer; those of
        # inference_mode are not trained.
        not_here = {*vars(self), "alora_invocation_tokens", "inference_mode", "task_type"}
        not_here |= {"peft_type", "base_model_name_or_path", "revision", "arrow_config"}
        # These cannot be merged, or are tied only until the model moves to its device.
        not_here |= {"lora_bias", "layer_replication", "ensure_weight_tying"}
        for name in self.peft:
            one_of("lora.peft", name, sorted({*vars(LoraConfig())} - not_here))
        for name, safe in (("init_lora_weights", ("gaussian", "orthogonal")), ("bias", ("none",))):
            if isinstance(value := self.peft.get(name), str):
                one_of(f"lora.peft.{name}", value, safe)


# Fresh adapters -----------------------------------------------------------------------------------


def add_lora(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """The model with fresh adapters, the base frozen; an error names what could take them."""
    base, targets = model.config.model_type, lora.target_modules
    unknown = base not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if targets == ATTENTION or (targets is None and not lora.target_parameters and unknown):
        targets = _attention_targets(model, lora)
    more, own = lora.peft, lora.peft.get("exclude_modules") or []
    if targets == "all-linear" and isinstance(own, list):
        # Linear by class alone: they return scores and indices, or take groups.
        others = [p for p, m in model.named_modules() if _OTHERS.search(type(m).__name__)]
        more = {**more, "exclude_modules": [*own, *others] or None}
    try:
        options = {**vars(lora), "target_modules": targets, "task_type": "CAUSAL_LM"}
        del options["peft"]
        adapted = get_peft_model(model, LoraConfig(**options, **more))
        assert isinstance(adapted, PeftModel)
        _check_targets(adapted, lora)
    except (TypeError, ValueError) as error:
        head = model.get_output_embeddings()
        endings = {
            path.removesuffix(".base_layer").rpartition(".")[2]
            for path, part in model.named_modules()
            if isinstance(part, _LINEAR) and part is not head and "lora_" not in path
        }
        raise ValueError(
            f'lora: {error} Set target_modules; the linear layers of this "{base}" model are '
            f"{sorted(endings)}."
        ) from error
    return adapted


def _check_targets(adapted: PeftModel, lora: Lora) -> None:
    """Refuses names that nothing has, which PEFT leaves out where there are others."""
    taken = adapted.base_model.targeted_module_names
    paths = [path for path, _ in adapted.get_base_model().named_modules()]
    listed = lora.target_modules if isinstance(lora.target_modules, list) else []
    for names, there in ((listed, taken), (lora.modules_to_save or [], paths)):
        if lost := [n for n in names if not any(f".{p}".endswith(f".{n}") for p in there)]:
            raise ValueError(f"no {lost}, or none that the other options leave.")


def _attention_targets(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Paths of the linear layers inside the decoder's attention, known by the names of classes.

    Of layers_to_transform alone, which PEFT does not apply to whole paths.
    """
    try:
        decoder: nn.Module = decoder_of(model)
    except UnsupportedError:
        decoder = model
    inside = {
        id(part)
        for attention in decoder.modules()
        if "attention" in type(attention).__name__.lower()
        for part in attention.modules()
        if isinstance(part, _LINEAR)
    }
    layers = lora.layers_to_transform
    chosen = {str(layer) for layer in (layers if isinstance(layers, list) else [layers])}
    return [
        path
        for path, part in model.named_modules()
        if id(part) in inside and (layers is None or chosen.intersection(path.split(".")))
    ]


# Adapters that are already trained ----------------------------------------------------------------


def base_of_adapter(name: str, revision: str | None = None) -> tuple[str, str | None] | None:
    """(name, revision) of the base of a saved adapter; None where ``name`` holds none."""
    path = repository_file(name, "adapter_config.json", revision)
    if path is None:
        return None
    config = PeftConfig.from_pretrained(path.removesuffix("adapter_config.json"))
    return str(config.base_model_name_or_path), config.revision


def repository_file(name: str, file: str, revision: str | None = None) -> str | None:
    """The path of a file of a folder or hub repository, None if there is none."""
    found: str | None = cached_file(
        model_source(name),
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def with_saved_adapter(
    model: PreTrainedModel, name: str, revision: str | None = None
) -> PreTrainedModel:
    """The model with a trained adapter merged into its weights, in their dtype."""
    if repository_file(name, "adapter_model.safetensors", revision) is None:
        raise OSError(
            f"{name} has no adapter_model.safetensors, and other formats may run code. Save the "
            "adapter again with save_pretrained."
        )
    adapted = PeftModel.from_pretrained(model, model_source(name), revision=revision)
    merged = merged_model(adapted)
    # Left behind, it would be taken for an adapter that is still there.
    merged.__dict__.pop("peft_config", None)
    return merged.requires_grad_(True)


def merged_model(model: PeftModel) -> PreTrainedModel:
    """The base with adapters merged into it, under its own names; ``model`` stays as it is.

    On the CPU; what no adapter changes shares its memory with ``model`` where that is there too.
    """
    memo: dict[int, Any] = {id(each): each.cpu() for each in model.buffers()}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().cpu(), requires_grad=False)
    copy = deepcopy(model, memo)
    for part in copy.modules():
        if isinstance(part, BaseTunerLayer):  # Merged in place, and tied weights one by one.
            layer = part.get_base_layer()
            for name, weight in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        merged = copy.base_model.merge_and_unload(adapter_names=[model.active_adapter])
    assert isinstance(merged, PreTrainedModel)
    if getattr(model.get_base_model().config, "tie_word_embeddings", False):
        embeddings, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        # Else some readers take one of the two for both.
        tied = torch.equal(embeddings.weight, head.weight)
        if tied:
            head.weight = embeddings.weight
        merged.config.tie_word_embeddings = tied
    return merged
