"""LoRA adapters: PEFT's options, where they go, and those that are trained on."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners import tuners_utils
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pl_pointwise.errors import UnsupportedError, one_of
from pl_pointwise.tasks.common.adapters import SavedAdapter
from pl_pointwise.tasks.common.adapters import merged_model as merged_model

from ..likelihood.scoring import REFERENCE
from ..likelihood.vocabulary import decoder_of

# PEFT asks a model by the name of before transformers 5.
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")

UNMERGEABLE = frozenset({"layer_replication", "lora_bias"})
"""Options of PEFT that add weights which the base has not."""
_LINEAR = (nn.Linear, Conv1D)
_WEIGHT_TAKEN = re.compile(
    r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|data)|, torch|\[)"
)
"""A weight that is used, not asked for its type, nor taken in slices as by Bloom's old switch."""


_SAFE_TEXTS = {"init_lora_weights": ("gaussian", "orthogonal"), "bias": ("none",)}
"""What these options may be, of texts: others train or replace the base."""


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

    >>> from pl_pointwise.tasks import Lora
    >>> adapters = Lora(r=16, lora_alpha=32, target_modules="all-linear", peft={"use_dora": True})
    >>> adapters.lora_alpha / adapters.r
    2.0
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
        not_here = {
            *vars(self),
            "alora_invocation_tokens",
            "inference_mode",
            "task_type",
        }
        not_here |= {"peft_type", "base_model_name_or_path", "revision", "arrow_config"}
        for name in self.peft:
            one_of("lora.peft", name, sorted({*vars(LoraConfig())} - not_here))
        for name, safe in _SAFE_TEXTS.items():
            value = self.peft.get(name)
            if isinstance(value, str):
                one_of(f"lora.peft.{name}", value, safe)


# Fresh adapters -----------------------------------------------------------------------------------


def add_lora(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """The model with fresh adapters, the base frozen; an error names what could take them."""
    base = model.config.model_type
    targets = lora.target_modules
    unknown = base not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    more = lora.peft
    routers = _routers(model)
    read = weights_read_by_their_layer(model)
    left_out = [*routers, *_refused_by_peft(model), *read]
    # PEFT would take these with all others; where one is named, _check_targets() refuses it.
    if targets == "all-linear" and left_out:
        more = {"exclude_modules": left_out, **more}
    try:
        if targets == "attention" or (
            targets is None and not lora.target_parameters and unknown
        ):
            targets = _attention_targets(model, lora)
            if not targets:
                raise ValueError(
                    "no linear layer of attention is in the model, or in these layers"
                )
        options = {**vars(lora), "target_modules": targets, "task_type": "CAUSAL_LM"}
        del options["peft"]
        adapted = get_peft_model(model, LoraConfig(**options, **more))
        assert isinstance(adapted, PeftModel)
        _check_targets(adapted, lora, routers, read)
        _say_how_many_layers(adapted, lora)
    except (TypeError, ValueError, UnsupportedError) as error:
        raise ValueError(
            f"lora: {str(error).rstrip('.')}. Set target_modules; the linear layers of this "
            f'"{base}" model are {_endings_of_linear_layers(model)}.'
        ) from error
    return adapted


def _routers(model: nn.Module) -> list[str]:
    """Layers that are linear by class alone: they return scores and indices, or groups."""
    paths = []
    for path, part in model.named_modules():
        if isinstance(part, nn.Linear) and re.search(
            "Router|Grouped", type(part).__name__
        ):
            paths.append(path)
    return paths


def _endings_of_linear_layers(model: PreTrainedModel) -> list[str]:
    """What target_modules may name, but the vocabulary's layer."""
    head = model.get_output_embeddings()
    endings = set[str]()
    for path, part in model.named_modules():
        # An error may come when adapters are in already, whose own layers are none of the model's.
        if isinstance(part, _LINEAR) and part is not head and "lora_" not in path:
            endings.add(path.removesuffix(".base_layer").rpartition(".")[2])
    return sorted(endings)


def _check_targets(
    adapted: PeftModel, lora: Lora, routers: Sequence[str], read: Sequence[str]
) -> None:
    """Refuses what PEFT takes without a word, and what an adapter then does not do."""
    taken = adapted.base_model.targeted_module_names
    # Of several names it leaves out those that nothing has.
    paths = [path for path, _ in adapted.get_base_model().named_modules()]
    listed = lora.target_modules if isinstance(lora.target_modules, list) else []
    for names, there in ((listed, taken), (lora.modules_to_save or [], paths)):
        lost = [name for name in names if not _is_ending(name, there)]
        if lost:
            raise ValueError(f"no {lost}, or none that the other options leave.")
    wrong = sorted(set(taken).intersection(routers))
    if wrong:
        raise ValueError(
            f"{wrong} are routers, not adapted: add them to peft.exclude_modules."
        )
    idle = sorted(set(taken).intersection(read))
    if idle:
        raise ValueError(
            f"{idle}: the layer around reads these weights itself, so adapters would do nothing in "
            "training and change the merged model. Leave them out"
        )
    if any(
        getattr(part, "kwargs", {}).get("tied_adapter") for part in adapted.modules()
    ):
        raise ValueError(
            "peft.ensure_weight_tying: adapters of embeddings and head are tied until the model "
            "moves to its device. Name embed_tokens in modules_to_save instead."
        )


def _is_ending(name: str, paths: Iterable[str]) -> bool:
    """Whether some path ends in these parts."""
    return any(f".{path}".endswith(f".{name}") for path in paths)


def _refused_by_peft(model: PreTrainedModel) -> list[str]:
    """Paths of linear layers that PEFT refuses: Mamba's kernels read their weights themselves."""
    # Private, so another version of PEFT may lack it; then PEFT refuses nothing by it either.
    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if check is None:
        return []
    refused = list[str]()
    for path, part in model.named_modules():
        if isinstance(part, _LINEAR):
            try:
                check(LoraConfig(), model, path.rpartition(".")[2])
            except ValueError:
                refused.append(path)
    return refused


def weights_read_by_their_layer(model: nn.Module) -> list[str]:
    """Paths of linear layers that are not called: the layer around takes their weights.

    As Mamba's kernels, of which the fast ones take more of them than the slow ones.
    """
    paths = list[str]()
    of_class = dict[type, frozenset[str]]()
    for path, part in model.named_modules():
        kind = type(part)
        if kind not in of_class:
            of_class[kind] = _weights_in_source(kind)
        for name in sorted(of_class[kind]):
            if isinstance(getattr(part, name, None), _LINEAR):
                paths.append(f"{path}.{name}" if path else name)
    return paths


def _weights_in_source(kind: type) -> frozenset[str]:
    """The names of parts whose weights a class of transformers takes."""
    names = set[str]()
    for parent in kind.__mro__:
        if parent.__module__.startswith("transformers.models."):
            with suppress(OSError, TypeError):  # no source at hand
                names.update(_WEIGHT_TAKEN.findall(inspect.getsource(parent)))
    return frozenset(names)


def _say_how_many_layers(adapted: PeftModel, lora: Lora) -> None:
    """One line where few layers have what was asked for, as attention in a hybrid."""
    total = getattr(
        adapted.get_base_model().config.get_text_config(), "num_hidden_layers", 0
    )
    numbers = set[str]()
    for path in adapted.base_model.targeted_module_names:
        numbers.update([part for part in path.split(".") if part.isdigit()][:1])
    count = len(numbers)
    if lora.layers_to_transform is None and 0 < count < total:
        rank_zero_info(
            f"lora: adapters are in {count} of {total} layers. target_modules: all-linear has them "
            "wherever a layer is linear."
        )


def _attention_targets(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Paths of the linear layers inside the decoder's attention, known by the names of classes.

    Of layers_to_transform alone, which PEFT does not apply to whole paths.
    """
    inside = set[int]()
    for attention in decoder_of(model).modules():
        if "attention" in type(attention).__name__.lower():
            inside.update(
                id(part) for part in attention.modules() if isinstance(part, _LINEAR)
            )
    # One number, several, or None for all layers.
    layers = lora.layers_to_transform
    chosen = {
        str(layer) for layer in (layers if isinstance(layers, list) else [layers])
    }
    paths = []
    for path, part in model.named_modules():
        of_chosen = layers is None or not chosen.isdisjoint(path.split("."))
        if id(part) in inside and of_chosen:
            paths.append(path)
    return paths


# A trained adapter that is trained on -------------------------------------------------------------


def continued(base: PreTrainedModel, adapter: SavedAdapter) -> PeftModel:
    """The base with the adapter, trainable, and beside it the adapter as it was: the reference.

    Raises:
        ValueError: PEFT does not hold two of this kind of adapter on one model.
    """
    options = adapter.config
    kind = options.peft_type.value
    if not isinstance(options, LoraConfig):
        raise ValueError(
            f"continue_adapter: {adapter.name} is of type {kind}, and a LoRA is trained on. Leave "
            "continue_adapter out: then it is merged into its base."
        )
    # Of these a second one would change the model, or be tied to the first.
    alone = [
        name
        for name in ("layer_replication", "ensure_weight_tying")
        if getattr(options, name, None)
    ]
    if alone:
        raise ValueError(
            f"continue_adapter: {adapter.name} has {', '.join(alone)}, so PEFT cannot hold it as "
            "it was beside it. Leave continue_adapter out: then it is merged into its base."
        )
    model = adapter.put_on(base, trainable=True)
    model.load_adapter(str(adapter.folder), REFERENCE, is_trainable=False)
    return model


def lora_of(config: PeftConfig) -> Lora:
    """The options of a saved adapter, as far as :class:`Lora` has them."""
    names = [option.name for option in fields(Lora) if option.name != "peft"]
    options: dict[str, Any] = {name: getattr(config, name, None) for name in names}
    targets = options["target_modules"]
    options["target_modules"] = (
        # PEFT holds names as a set, whose order is another in every process.
        targets if isinstance(targets, str) else sorted(targets or [])
    )
    return Lora(**options)
