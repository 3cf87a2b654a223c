"""From hidden states to token statistics without ever holding (tokens, vocabulary) as a whole.

    log-likelihood   ℓ_t = log π(y_t)
    divergence       KL_t = Σ_v π(v) (log π(v) − log π_ref(v)),   over the full vocabulary
    lead             log π(y_t) − max_{v ≠ y_t} log π(v): above 0 where greedy decoding takes y_t

at each position that predicts a response token, in float32 (float64 for a float64 model) whatever
the model's dtype. The projection runs over a chunk of positions at a time, so that at most one
chunk's logits are alive. With more than one chunk their gradient cannot wait for the backward pass:
where nothing from the hidden states on is trained it is computed at once, by token, as fused linear
losses do; else each chunk is computed again in the backward pass.

The logits are the model's own: its forward runs with the decoder's output put in place, so scaling
(Granite, Cohere) and soft-capping (Gemma) stay. Only the matrix product is done here, because a
model in bfloat16 rounds its logits to 8 bits before they are summed, which biases training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from pl_pointwise.errors import UnsupportedError

# logits in a chunk: 32 MiB in float32, of which seven or so are alive
CHUNK_ELEMENTS = 2**23


class TokenStatistics(NamedTuple):
    """Of n response tokens; of the m of them that a reference is asked for; None: not asked for."""

    log_likelihood: Tensor  # (n,)
    divergence: Tensor | None = None  # (m,)
    reference: Tensor | None = None  # (m,) log-likelihood
    lead: Tensor | None = None  # (n,)


def token_statistics(
    log_policy: Tensor,
    targets: Tensor,
    log_reference: Tensor | None = None,
    leads: bool = False,
) -> TokenStatistics:
    """From log-probabilities (n, V) ℓ of each target (n,), with a reference KL and its ℓ too."""
    target = targets[:, None]
    log_likelihood = log_policy.gather(1, target).squeeze(1)
    lead = None
    if leads:
        lead = log_likelihood - log_policy.gather(
            1, _rivals(log_policy, target)
        ).squeeze(1)
    # Only responses of the objective, or of a relative bound, have a reference.
    if log_reference is None:
        return TokenStatistics(log_likelihood, lead=lead)
    divergence = (log_policy.exp() * (log_policy - log_reference)).sum(-1)
    known = log_reference.gather(1, target).squeeze(1)
    return TokenStatistics(log_likelihood, divergence, known, lead)


def _rivals(log_policy: Tensor, target: Tensor) -> Tensor:
    """The likeliest other token of each row, (n, 1)."""
    return log_policy.detach().scatter(1, target, -torch.inf).argmax(-1, keepdim=True)


def chunked_token_statistics(
    head: VocabularyHead,
    hidden: Tensor,
    targets: Tensor,
    reference_hidden: Tensor | None = None,
    reference_mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    chunk_elements: int = CHUNK_ELEMENTS,
    leads: bool = False,
) -> TokenStatistics:
    """:func:`token_statistics` from hidden states (n, H), differentiable in the policy's.

    reference_hidden: (m, H), of the first m of them.
    reference_mode: a context in which the head is the reference's, where the two differ.
    chunk_elements: the most logits to hold at a time.
    """

    def of_chunk(
        hidden: Tensor, targets: Tensor, reference: Tensor | None
    ) -> TokenStatistics:
        log_reference = None
        if reference is not None:
            with torch.no_grad(), reference_mode():
                log_reference = log_softmax(head(reference))
        return token_statistics(
            log_softmax(head(hidden)), targets, log_reference, leads
        )

    size = max(1, chunk_elements // int(head.model.config.get_text_config().vocab_size))
    several = len(hidden) > size and torch.is_grad_enabled()
    rng = not head.plain  # Only an adapted head can hold dropout.
    again = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=rng)
    at_once = several and hidden.requires_grad and head.frozen
    pieces: list[TokenStatistics] = []
    known = hidden[:0] if reference_hidden is None else reference_hidden
    bounds = [
        *range(0, len(known), size),
        *range(len(known), len(hidden), size),
        len(hidden),
    ]
    for start, end in pairwise(bounds):
        reference = known[start:end] if start < len(known) else None
        states = hidden[start:end]
        words = targets[start:end]
        # A frozen head: its gradient by token costs less than computing logits twice.
        if at_once:
            outputs = _WithGradient.apply(states, words, reference, head, leads)
            pieces.append(TokenStatistics(*outputs))
        elif several:
            pieces.append(again(states, words, reference))
        else:
            pieces.append(of_chunk(states, words, reference))
    log_likelihoods, *others = zip(*pieces, strict=True)
    joined: list[Tensor | None] = []
    for column in others:
        # Chunks behind the last that has a reference have none; of no statistic all have none.
        present = [piece for piece in column if piece is not None]
        joined.append(torch.cat(present) if present else None)
    return TokenStatistics(torch.cat(log_likelihoods), *joined)


class _WithGradient(torch.autograd.Function):
    """The statistics of hidden states (n, H) under a frozen head, and their gradient.

    A token's statistics depend on its own hidden state alone, so row t of the gradient of Σ_t ℓ_t
    is that of ℓ_t, and the backward pass multiplies by what comes in. Kept are (n, H) for each.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        reference: Tensor | None,
        head: VocabularyHead,
        leads: bool,
    ) -> TokenStatistics:
        with torch.enable_grad():
            # Rounded once, at the end.
            wide = torch.promote_types(hidden.dtype, torch.float32)
            rows = hidden.detach().to(wide).requires_grad_()
            logits = head(rows)
        log_policy, target = log_softmax(logits.detach()), targets[:, None]
        log_reference = None if reference is None else log_softmax(head(reference))
        statistics = token_statistics(log_policy, targets, log_reference, leads)
        probability = log_policy.exp()
        ones = probability.new_ones(target.shape)
        slopes: dict[int, Tensor] = {}
        if leads:  # 1_y − 1_rival
            slopes[3] = torch.zeros_like(probability).scatter_(1, target, ones)
            slopes[3].scatter_(1, _rivals(log_policy, target), -ones)
        if log_reference is not None and statistics.divergence is not None:
            # ∂KL/∂z = π ∘ (log π − log π_ref − KL)
            slopes[1] = log_policy.sub_(log_reference).sub_(
                statistics.divergence[:, None]
            )
            slopes[1].mul_(probability)
        slopes[0] = probability.neg_().scatter_add_(1, target, ones)  # 1_y − π
        ctx.save_for_backward(
            *(
                torch.autograd.grad(
                    logits, rows, slope.to(logits.dtype), retain_graph=True
                )[0]
                for slope in slopes.values()
            )
        )
        ctx.outputs, ctx.dtype = list(slopes), hidden.dtype
        ctx.set_materialize_grads(False)
        if statistics.reference is not None:
            ctx.mark_non_differentiable(statistics.reference)
        return statistics

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        parts = []
        for gradient, output in zip(ctx.saved_tensors, ctx.outputs, strict=True):
            weight = incoming[output]
            if weight is not None:
                parts.append(gradient * weight[:, None])
        of_hidden = sum(parts[1:], parts[0]).to(ctx.dtype) if parts else None
        return of_hidden, None, None, None, None


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model that gives the last hidden states."""
    decoder = model.get_decoder()
    # Some classes return themselves, and have the decoder under "model".
    if decoder is model:
        decoder = getattr(model, "model", None)
    if decoder is None:
        raise UnsupportedError(f"{type(model).__name__} has no separate decoder")
    assert isinstance(decoder, nn.Module)
    return decoder


class _DecoderOutputs(BaseModelOutputWithPast):
    """A decoder's outputs as a head reads them; None for what some decoders add."""

    def __getattr__(self, name: str) -> None:
        return None


class VocabularyHead:
    """A causal language model from its last hidden states on: (n, H) → logits (n, V).

    Made again for every step: it may hold a copy of the weight in the dtype it multiplies in. The
    model is without a PEFT wrapper; layers inside it may be adapted.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        linear = model.get_output_embeddings()
        if linear is None:
            raise UnsupportedError(
                f"{type(model).__name__} has no separate vocabulary layer"
            )
        self.model, self.decoder, self.linear = model, decoder_of(model), linear
        # Otherwise adapted or quantised: then the layer's own product is taken.
        self.plain = type(linear) is nn.Linear
        if self.plain:
            weight, self.bias = linear.weight, linear.bias
            device, wide = (
                weight.device.type,
                torch.promote_types(weight.dtype, torch.float32),
            )
            # The dtype in which the model would multiply: autocast's, else the weight's own.
            autocast = torch.is_autocast_enabled(device)
            self.products = (
                torch.get_autocast_dtype(device) if autocast else weight.dtype
            )
            self.weight = weight.to(self.products if device == "cuda" else wide)

    @property
    def frozen(self) -> bool:
        """Whether nothing behind the hidden states is trained."""
        if not self.plain or any(
            weight.requires_grad for weight in self.linear.parameters()
        ):
            return False
        inside = set(self.decoder.parameters())
        return not any(
            p.requires_grad for p in self.model.parameters() if p not in inside
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        outputs = _DecoderOutputs(last_hidden_state=hidden[None])
        ids = torch.zeros((1, len(hidden)), dtype=torch.long, device=hidden.device)
        product = (
            _forward_is(self.linear, self._project) if self.plain else nullcontext()
        )
        with _forward_is(self.decoder, lambda *args, **kwargs: outputs), product:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits[0]

    def _project(self, hidden: Tensor) -> Tensor:
        """(1, n, H) → (1, n, V), float32 or wider."""
        logits: Tensor = _Project.apply(hidden[0], self.weight, self.products)
        # Phi's and GPT-J's heads have one.
        if self.bias is not None:
            logits = logits + self.bias
        return logits[None]


class _Project(torch.autograd.Function):
    """hidden (n, H) · weightᵀ (H, V) → (n, V) in float32 or wider.

    Factors may be rounded to ``products`` where a model of that dtype would round them; sums never.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, products: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(weight, hidden if ctx.needs_input_grad[1] else None)
        ctx.products, ctx.dtype = products, hidden.dtype
        return _multiply(hidden, weight.t(), products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight, hidden = ctx.saved_tensors
        of_weight = None
        if hidden is not None:
            of_weight = _multiply(gradient.t(), hidden, ctx.products).to(weight.dtype)
        return _multiply(gradient, weight, ctx.products).to(ctx.dtype), of_weight, None


def _multiply(left: Tensor, right: Tensor, products: torch.dtype) -> Tensor:
    """left · right, factors rounded to ``products`` at worst, summed in float32 or wider."""
    device = left.device.type
    with torch.autocast(device, enabled=False):
        low = products in (torch.bfloat16, torch.float16)
        # Tensor cores multiply in half precision and give float32, from torch 2.8 on.
        if device == "cuda" and low and torch.__version__ >= "2.8":
            return torch.mm(
                left.to(products), right.to(products), out_dtype=torch.float32
            )
        wide = torch.promote_types(products, torch.float32)
        return torch.mm(left.to(wide), right.to(wide))


def log_softmax(logits: Tensor) -> Tensor:
    """In float32 or wider."""
    return logits.log_softmax(
        -1, dtype=torch.promote_types(logits.dtype, torch.float32)
    )


@contextmanager
def _forward_is(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call this function instead of the module's forward, hooks and all else unchanged."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
