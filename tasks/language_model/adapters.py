"""LoRA adapters: PEFT's options, where they go by default, adapters already trained, merging.

With its adapters off, the model is the reference policy. So those options of PEFT's are offered
that leave the base's weights as they are, and no others.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
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
    """Low-rank adapters: W + (lora_alpha / r)·B·A beside chosen linear layers W.

    The options are those of PEFT's LoraConfig that leave W as it is, under the same names; PEFT's
    documentation says what each does. The others, such as ``bias``, would change the reference.

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
        init_lora_weights: how A and B start. Those of PEFT's that split W, such as "pissa", would
            change the reference.

    Raises:
        ValueError: such a start.
    """

    r: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    exclude_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    lora_bias: bool = False
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True

    def __post_init__(self) -> None:
        if isinstance(self.init_lora_weights, str):
            one_of("lora.init_lora_weights", self.init_lora_weights, ("gaussian", "orthogonal"))


# Fresh adapters -----------------------------------------------------------------------------------


def add_lora(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """The model with fresh adapters, the base frozen.

    Raises:
        ValueError: a name that matches nothing, or nothing in the model can take them; names what
            could.
    """
    base = model.config.model_type
    targets = lora.target_modules
    unknown = base not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    try:
        if targets == ATTENTION or (targets is None and not lora.target_parameters and unknown):
            targets = _attention_targets(model, lora)
        options = vars(lora) | {"target_modules": targets}
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        assert isinstance(adapted, PeftModel)
        _require_matches(adapted, lora)
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

    PEFT applies layers_to_transform to the endings of names, but not to whole paths.

    Raises:
        ValueError: none.
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
    paths = [path for path, part in model.named_modules() if id(part) in inside]
    if lora.layers_to_transform is not None:
        by_ending = LoraConfig(
            target_modules=[path.rpartition(".")[2] for path in paths],
            layers_to_transform=lora.layers_to_transform,
            layers_pattern=lora.layers_pattern,
        )
        paths = [path for path in paths if check_target_module_exists(by_ending, path)]
    if not paths:
        raise ValueError("there is no attention to adapt.")
    return paths


def _require_matches(adapted: PeftModel, lora: Lora) -> None:
    """
    Raises:
        ValueError: a name that nothing in the model has, which PEFT leaves out without a word.
    """
    targets = lora.target_modules if isinstance(lora.target_modules, list) else []
    paths = [path for path, _ in adapted.get_base_model().named_modules()]
    given = {
        "target_modules": (targets, adapted.base_model.targeted_module_names),
        "modules_to_save": (lora.modules_to_save or [], paths),
    }
    for option, (names, there) in given.items():
        if lost := [n for n in names if not any(f".{path}".endswith(f".{n}") for path in there)]:
            raise ValueError(f"{option}: no {lost}, or none that the other options leave.")


# Adapters that are already trained ----------------------------------------------------------------


def saved_adapter(name: str, revision: str | None = None) -> PeftConfig | None:
    """The configuration of a folder or hub repository that holds an adapter; None if it holds none.

    Raises:
        ValueError: an adapter that names no base.
    """
    path = repository_file(name, "adapter_config.json", revision)
    if path is None:
        return None
    config = PeftConfig.from_pretrained(path.removesuffix("adapter_config.json"))
    if config.base_model_name_or_path is None:
        raise ValueError(
            f"{name}: its adapter_config.json does not say for which model the adapter is. Set "
            "base_model_name_or_path there."
        )
    return config


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
    """The model with a trained adapter merged into its weights, in their dtype.

    Raises:
        OSError: an adapter that is not in safetensors.
    """
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
    """The weights of the model without its adapters, which are merged into it.

    By the names of the model they were added to, in its dtype, on the CPU. The model itself stays
    as it is, as merging in place and back would round its weights: each layer is merged in a copy.
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
