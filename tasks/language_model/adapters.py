"""LoRA adapters: PEFT's options, where they go by default, adapters already trained, merging."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file

from pl_pointwise.errors import UnsupportedError, one_of
from pl_pointwise.tasks.common.dropout import RedrawnDropout, use_quick_dropout
from pl_pointwise.tasks.common.models import model_source

from .vocabulary import decoder_of

ATTENTION = "attention"
_LINEAR = (nn.Linear, Conv1D)


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
        for name, safe in (("init_lora_weights", ("gaussian", "orthogonal")), ("bias", ("none",))):
            if isinstance(value := self.peft.get(name), str):
                one_of(f"lora.peft.{name}", value, safe)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Lora:
        """From a mapping, with PEFT's options among the others, as checkpoints had them once."""
        own = {key: value for key, value in options.items() if key in cls.__annotations__}
        rest = {key: value for key, value in options.items() if key not in own}
        return cls(**own | {"peft": {**rest, **own.get("peft", {})}})


# Fresh adapters -----------------------------------------------------------------------------------


def add_lora(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """The model with fresh adapters, the base frozen; an error names what could take them."""
    base, targets = model.config.model_type, lora.target_modules
    unknown = base not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    if targets == ATTENTION or (targets is None and not lora.target_parameters and unknown):
        targets = _attention_targets(model, lora)
    try:
        options = {**vars(lora), "target_modules": targets, "task_type": "CAUSAL_LM"}
        more = options.pop("peft")
        adapted = get_peft_model(model, LoraConfig(**options, **more))
        assert isinstance(adapted, PeftModel)
        # Of several names PEFT leaves out without a word those that nothing has.
        paths = [path for path, _ in adapted.get_base_model().named_modules()]
        listed = lora.target_modules if isinstance(lora.target_modules, list) else []
        for names, there in (
            (listed, adapted.base_model.targeted_module_names),
            (lora.modules_to_save or [], paths),
        ):
            if lost := [n for n in names if not any(f".{p}".endswith(f".{n}") for p in there)]:
                raise ValueError(f"no {lost}, or none that the other options leave.")
    except ValueError as error:
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
    use_quick_dropout(adapted, RedrawnDropout)
    return adapted


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


def saved_adapter(name: str, revision: str | None = None) -> PeftConfig | None:
    """The configuration of the adapter in a folder or hub repository; None if it holds none."""
    path = repository_file(name, "adapter_config.json", revision)
    if path is None:
        return None
    return PeftConfig.from_pretrained(path.removesuffix("adapter_config.json"))


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
    merged = adapted.base_model.merge_and_unload(safe_merge=True)
    assert isinstance(merged, PreTrainedModel)
    # Left behind, it would be taken for an adapter that is still there.
    merged.__dict__.pop("peft_config", None)
    return merged.requires_grad_(True)


def merged_weights(model: PeftModel) -> dict[str, Tensor]:
    """The weights of the base, adapters merged into them, by its names, in its dtype, on the CPU.

    Each layer is merged in a copy: merging in place and back would round the model's own weights.
    """
    base, adapter = model.get_base_model(), model.active_adapter
    adapted = {name: part for name, part in base.named_modules() if isinstance(part, LoraLayer)}
    # Two parameters of one module are adapted by one layer around the other.
    layers = {n: part for n, part in adapted.items() if n.removesuffix(".base_layer") == n}
    merged = {}
    for name, weight in base.state_dict().items():
        if any(name.startswith(f"{layer}.") for layer in layers) or ".original_module." in name:
            continue
        merged[name.replace(f".modules_to_save.{adapter}.", ".")] = weight.cpu()
    for name, layer in layers.items():
        layer = deepcopy(layer)
        for part in reversed([part for part in layer.modules() if isinstance(part, LoraLayer)]):
            part.merge(adapter_names=[adapter])
        for key, weight in layer.get_base_layer().state_dict().items():
            merged[f"{name}.{key}"] = weight.cpu()
    return merged
