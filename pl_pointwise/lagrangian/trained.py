"""Which weights are trained, asked for anew each time: what is frozen or replaced is not held."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DataError, TrainingError
from .terms import number_of_ranks, over_ranks, widest

Weights = nn.Module | Iterable[Tensor] | Callable[[], nn.Module]
"""A model, its parameters, or what returns the model of now."""


def source_of(parameters: Weights | None) -> Any:
    """What :func:`trained` asks; an iterator is read once, as it can be."""
    if isinstance(parameters, nn.Module):
        refuse_hidden_gradients(parameters)
        return parameters
    # A function is asked anew each time: model_init makes another model of each trial.
    if parameters is None or callable(parameters):
        return parameters
    iterable = isinstance(parameters, Iterable) and not isinstance(
        parameters, (str, Tensor)
    )
    weights: list[Any] = list(parameters) if iterable else [parameters]
    others = [weight for weight in weights if not isinstance(weight, Tensor)]
    if not iterable or others:
        others = others or weights
        raise DataError(
            "parameters: give the model, model.parameters(), or a function that returns the model; "
            f"got {type(parameters).__name__} with {type(others[0]).__name__}."
        )
    if any(hasattr(weight, "_is_flat_param") for weight in weights):
        raise TrainingError(HIDDEN)
    return weights


def refuse_hidden_gradients(model: nn.Module) -> None:
    """Refuses FSDP1 and DeepSpeed, by the names of their classes: neither is imported for it."""
    for part in model.modules():
        for kind in type(part).__mro__:
            if (kind.__module__.partition(".")[0], kind.__name__) in HIDING:
                raise TrainingError(HIDDEN)


HIDING = {
    ("torch", "FullyShardedDataParallel"),
    ("fairscale", "FullyShardedDataParallel"),
    ("deepspeed", "DeepSpeedEngine"),
    ("deepspeed", "PipelineEngine"),
}
HIDDEN = (
    "FSDP1 (FullyShardedDataParallel) and DeepSpeed hide the gradient of one term, which is to be "
    "measured. Take FSDP2 (torch.distributed.fsdp.fully_shard; of Accelerate fsdp_version=2), or "
    "DistributedDataParallel."
)


def trained(source: Any) -> list[Tensor]:
    """The weights that require a gradient now."""
    if source is None:
        return []
    if not isinstance(source, (nn.Module, list)):
        source = source()
    if isinstance(source, nn.Module):
        # A model may be wrapped later, or be of a function.
        refuse_hidden_gradients(source)
        for part in source.modules():
            # Between forward and backward FSDP2's root holds whole weights, without their .grad.
            # (Its class is looked at by name: to import it takes a second.)
            if type(part).__name__.startswith("FSDP") and hasattr(part, "reshard"):
                part.reshard()  # type: ignore[operator]
        source = source.parameters()
    return [weight for weight in source if weight.requires_grad]


def is_sharded(weight: Tensor) -> bool:
    """Whether it is a DTensor, of which this rank has a part."""
    return hasattr(weight, "full_tensor")


def require_all_sharded(weights: list[Tensor]) -> bool:
    """Whether they are sharded; refuses weights of which some are and others are not."""
    sharded = [is_sharded(weight) for weight in weights]
    if any(sharded) and not all(sharded):
        whole = len(sharded) - sum(sharded)
        raise TrainingError(
            f"{whole} of {len(sharded)} trained weights are not sharded: nothing "
            "adds up their gradients over the ranks. fully_shard what holds them, too."
        )
    return bool(sharded) and all(sharded)


def require_equal_over_ranks(weights: list[Tensor]) -> None:
    """Refuses weights that differ between the ranks; of sharded ones nothing can be said."""
    whole = [weight.detach() for weight in weights if not is_sharded(weight)]
    # Of sharded weights each rank has other parts, which nothing can compare.
    if number_of_ranks() == 1 or not whole:
        return
    wide = widest(whole[0].device)
    norms = [torch.linalg.vector_norm(weight.to(wide)) for weight in whole]
    sums = [weight.to(wide).sum() for weight in whole]
    digests = torch.stack([*norms, *sums])
    highest, lowest = over_ranks(digests, "max"), -over_ranks(-digests, "max")
    # Of a weight that is not finite another error speaks.
    apart = (highest - lowest).nan_to_num(0.0, 0.0, 0.0)
    if bool((apart > 1e-7 * (1 + highest.abs().nan_to_num(0.0, 0.0, 0.0))).any()):
        raise TrainingError(
            "The weights differ between the ranks, so their gradients were not averaged. Wrap the "
            "model in DistributedDataParallel, without static_graph, start from the same weights, "
            "and call that wrapped model, not the one in it."
        )


def refuse_static_graph(values: Tensor) -> None:
    """Refuses DDP's static_graph, which adds up no gradient of a step whose Λ was measured."""
    nodes: list[Any] = [values.grad_fn]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # DDP leaves itself at a node of its own between the output and the loss.
        model = getattr(node, "ddp_weakref", None)
        if model is not None and getattr(model(), "static_graph", False):
            raise TrainingError(STATIC_GRAPH)
        nodes += [following for following, _ in node.next_functions]


STATIC_GRAPH = (
    "DistributedDataParallel(static_graph=True) averages gradients once a step, and some steps "
    "here take several backward passes through a graph: ranks would train different weights. "
    "Leave static_graph out."
)

COMPILED = (
    "A graph of torch.compile cannot be differentiated twice, as it has given its buffers away. "
    "Make the PointwiseLoss before the compiled model first runs, or set "
    "torch._functorch.config.donated_buffer = False."
)


REENTRANT = (
    "Gradient checkpointing with use_reentrant=True hides the gradient of one term. Set "
    "use_reentrant=False (of a Trainer: gradient_checkpointing_kwargs)."
)


def keep_buffers_of_compiled_graphs() -> None:
    """Graphs that are compiled from now on can be differentiated more than once."""
    import torch._functorch.config as options

    # Older versions of torch keep the buffers anyway.
    if hasattr(options, "donated_buffer"):
        options.donated_buffer = False


@contextmanager
def as_backward_of_fabric() -> Iterator[None]:
    """Lets gradients through a model of Fabric's, which refuses them outside its backward().

    What it adds there is the scaling of float16, which a measured norm is to be without.
    """
    names = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
    loaded = [sys.modules[name] for name in names if name in sys.modules]
    before = [getattr(module, FABRIC_FLAG, None) for module in loaded]
    within = True
    try:
        for module in loaded:
            setattr(module, FABRIC_FLAG, within)
        yield
    finally:
        for module, flag in zip(loaded, before, strict=True):
            setattr(module, FABRIC_FLAG, flag)


FABRIC_FLAG = "_in_fabric_backward"
