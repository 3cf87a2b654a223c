"""Log-likelihoods of responses and their divergence from the reference policy.

Given a batch of prompts and several responses to each (batch.py),
:class:`ResponseScorer`
computes, teacher-forced and in float32, each response's log-likelihood and the divergence
KL(π_θ ‖ π_ref) at its positions, differentiable in the policy. It knows three scoring
methods, which differ in cost and in nothing else:

    plain          a whole sequence for each pair, all its logits; any model
    chunked        a whole sequence for each pair, logits only where a response is predicted and
                   in chunks (vocabulary.py); any model with a separate vocabulary layer
    shared_prompt  as chunked, the prompt once for all its responses (shared_prompt.py)

and takes the last that agrees with the plain one on the first batch it sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from peft import PeftModel
from torch import Tensor, nn

from pl_pointwise.tasks.common.agreement import evaluation_mode
from pl_pointwise.tasks.common.sizes import recurring

from .batch import Pairs
from .frozen import frozen_reference
from .reference import (
    ReferenceCache,
    adapters_off,
    base_of,
    head_is_adapted,
    reference_problem,
)
from .shared_prompt import Layout, install, layout_in_use, uninstall
from .vocabulary import (
    CHUNK_ELEMENTS,
    TokenStatistics,
    VocabularyHead,
    chunked_token_statistics,
    decoder_of,
    joined,
    token_statistics,
)

log = logging.getLogger(__name__)

ScoringMethod = Literal["shared_prompt", "chunked", "plain"]


@dataclass(frozen=True)
class ResponseStatistics:
    """Per (prompt, response), float32 or wider; 0 where there is no response.

    With s the sum over the response's tokens, end token included, and s̄ their mean:
    """

    log_likelihood: Tensor  # (B, R)  s = log π(y|x)
    mean_log_likelihood: Tensor  # (B, R)  s̄ = s / |y|
    lengths: Tensor  # (B, R)  |y| in tokens, 0 where there is no response
    kl: Tensor | None = None  # (B, R)  mean over tokens of KL(π ‖ π_ref); 0 where not asked for
    reference_log_likelihood: Tensor | None = None  # (B, R)  s_ref, likewise
    reference_mean_log_likelihood: Tensor | None = None  # (B, R)  s̄_ref, likewise

    @property
    def present(self) -> Tensor:
        """(B, R) bool: where there is a response."""
        return self.lengths > 0


class ResponseScorer:
    """Response statistics of a causal language model, by the fastest way that is right for it.

    Args:
        model: a causal language model of transformers; with adapters if a reference is wanted.
        method: "auto" compares on the first batch (see :meth:`choose_method`); a name is taken as
            it is.
        cache: the reference's hidden states for later epochs; not used by the plain method.
        chunk_elements: the most logits to hold at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        method: ScoringMethod | Literal["auto"] = "auto",
        cache: ReferenceCache | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        if method not in ("auto", *get_args(ScoringMethod)):
            raise ValueError(
                f'method must be "auto" or one of {get_args(ScoringMethod)}, got "{method}".'
            )
        self.model = model
        self.method = method
        self.cache = cache
        self.chunk_elements = chunk_elements
        if method == "shared_prompt":
            install(base_of(model))

    def __call__(
        self, batch: Mapping[str, Any], reference: bool | Tensor = True
    ) -> ResponseStatistics:
        """Statistics of every response in the batch, differentiable in the policy.

        Args:
            batch: see batch.py; other entries are ignored.
            reference: whether to compute what needs the reference policy; (B, R) bool asks for
                some of the responses only, and costs only those.
        """
        pairs = Pairs.of(batch)
        if self.method == "auto":
            self.choose_method(batch)
        wanted = _wanted(pairs, reference)
        if self.method == "plain":
            tokens = self._plain(pairs, wanted)
        else:
            tokens = self._chunked(pairs, wanted)
        return _summed(pairs, wanted, *tokens)

    def choose_method(self, batch: Mapping[str, Any]) -> ScoringMethod:
        """Compare the fast ways with the plain one on a batch, keep the fastest that agrees.

        Two samples of the batch are enough, the longest and another; values only, without
        gradients, in evaluation mode. What is refused, and why, is logged.
        """
        probe = _probe(batch)
        reference = reference_problem(self.model) is None
        # Frozen weights need no comparison of their own, and are not read before they are needed.
        reference &= frozen_reference(self.model) is None
        cache, self.cache = self.cache, None
        try:
            # In float32 where the weights are: agreement is then close enough to tell anything
            device = batch["prompt_ids"].device.type
            exact = torch.autocast(device, enabled=False)
            with evaluation_mode(self.model), torch.no_grad(), exact:
                plain = self._plain_singly(Pairs.of(probe), reference)
                chosen: ScoringMethod = "plain"
                for method in ("shared_prompt", "chunked"):
                    problem = self._try(method, probe, reference, plain)
                    if problem is None:
                        chosen = method
                        break
                    log.warning('The scoring method "%s" is not used: %s.', method, problem)
        except BaseException:  # the plain method failed, so nothing was found out
            self.method = "auto"
            raise
        finally:
            self.cache = cache
        self.method = chosen
        log.info('Response log-likelihoods are computed by the scoring method "%s".', chosen)
        return chosen

    def _try(
        self,
        method: ScoringMethod,
        probe: dict[str, Tensor],
        reference: bool,
        plain: ResponseStatistics,
    ) -> str | None:
        """Why a method cannot be used here, or None if it gives what the plain one gave."""
        base = base_of(self.model)
        if isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning:
            return "the adapter is a learned prompt, which only the whole model puts in front"
        try:
            if method == "shared_prompt":
                if getattr(base, "_is_stateful", False):
                    return f"{type(base).__name__} has recurrent layers"
                install(base)
            self.method = method
            fast = self(probe, reference)
            problem = _disagreement(fast, plain, _tolerance(self.model))
        except Exception as error:  # whatever a model may raise that was not built for this
            problem = f"{type(error).__name__}: {error}"
        if problem and method == "shared_prompt":
            uninstall(base)
        return problem

    def _plain_singly(self, pairs: Pairs, reference: bool) -> ResponseStatistics:
        """The same for one pair at a time, as the logits of several may be gigabytes."""
        pieces = []
        for place in pairs.places:
            pair = pairs.only({place})
            pieces.append(self._plain(pair, pair if reference else None))
        return _summed(pairs, pairs if reference else None, *joined(pieces))

    def _plain(self, pairs: Pairs, wanted: Pairs | None) -> TokenStatistics:
        """Per-token statistics (n,), (m,), (m,) from full logits; the yardstick of the others."""
        ids, mask, predicting = pairs.sequences()
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits = logits.flatten(0, 1)[predicting]
        if wanted is None:
            return token_statistics(logits, pairs.targets)
        with adapters_off(self.model):
            ids, mask, predicting = wanted.sequences()
            reference = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            reference = reference.flatten(0, 1)[predicting]
        log_likelihood, _, _ = token_statistics(logits, pairs.targets)
        chosen = wanted.within(pairs)
        _, kl, reference_ll = token_statistics(logits[chosen], wanted.targets, reference)
        return log_likelihood, kl, reference_ll

    def _chunked(self, pairs: Pairs, wanted: Pairs | None) -> TokenStatistics:
        """The same from hidden states at the predicting positions only, logits in chunks."""
        reference = None if wanted is None else self._reference_hidden(wanted)
        hidden = self._hidden(pairs)
        if reference is not None:
            reference = reference.to(hidden.dtype)
        base = base_of(self.model)
        head, reference_head = VocabularyHead(base), None
        mode: Callable[[], AbstractContextManager[Any]] = nullcontext
        if head_is_adapted(self.model):
            mode = partial(adapters_off, self.model)
        frozen = frozen_reference(self.model)
        if frozen is not None and reference is not None:
            mode = partial(frozen.in_place, self.model, head_only=True)
            with torch.no_grad(), mode():
                reference_head = VocabularyHead(base)

        def statistics(
            hidden: Tensor, targets: Tensor, reference: Tensor | None
        ) -> TokenStatistics:
            return chunked_token_statistics(
                head, hidden, targets, reference, mode, self.chunk_elements, reference_head
            )

        if wanted is None or len(wanted.targets) == len(pairs.targets):
            return statistics(hidden, pairs.targets, reference)
        asked = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        asked[wanted.within(pairs)] = True
        some, kl, reference_ll = statistics(hidden[asked], wanted.targets, reference)
        rest, _, _ = statistics(hidden[~asked], pairs.targets[~asked], None)
        log_likelihood = some.new_zeros(len(hidden))
        log_likelihood = log_likelihood.masked_scatter(asked, some).masked_scatter(~asked, rest)
        return log_likelihood, kl, reference_ll

    def _hidden(self, pairs: Pairs) -> Tensor:
        """Last hidden states (n, H) at the places that predict a response token."""
        decoder = decoder_of(base_of(self.model))
        if self.method == "chunked":
            ids, mask, predicting = pairs.sequences()
            outputs = decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            return outputs.last_hidden_state.flatten(0, 1)[predicting]
        device = pairs.prompt_ids.device
        layout = Layout.of(pairs.prompt_lengths, pairs.response_lengths, *pairs.widths)
        layout = layout.filled(recurring(len(layout.source), device)).to(device)
        ids = torch.cat([pairs.prompt_ids.flatten(), pairs.response_ids.flatten()])[layout.source]
        with layout_in_use(layout):
            outputs = decoder(
                input_ids=ids[None],
                # with a mask, transformers does not take the row for several packed sequences
                attention_mask=torch.ones_like(ids[None]),
                position_ids=layout.positions[None],
                use_cache=False,
            )
        return outputs.last_hidden_state[0, layout.predicting]

    def _reference_hidden(self, wanted: Pairs) -> Tensor:
        """Last hidden states (m, H) of the reference, from the cache as far as it has them."""
        if self.cache is None:
            with adapters_off(self.model):
                return self._hidden(wanted)
        device = wanted.prompt_ids.device
        prompts, responses = wanted.prompt_ids.cpu(), wanted.response_ids.cpu()
        keys = {
            (row, column): ReferenceCache.key(
                prompts[row, : wanted.prompt_lengths[row]],
                responses[row, column, : wanted.length(row, column)],
            )
            for row, column in wanted.places
        }
        kept = {place: self.cache.get(key) for place, key in keys.items()}
        missing = wanted.only({place for place, hidden in kept.items() if hidden is None})
        if missing.places:
            with adapters_off(self.model):
                hidden = self._hidden(missing)
            sizes = [missing.length(*place) for place in missing.places]
            for place, piece in zip(missing.places, hidden.split(sizes), strict=True):
                self.cache.put(keys[place], piece)
                kept[place] = piece.to(self.cache.dtype)  # so that every epoch reads the same
        pieces = [piece for place in wanted.places if (piece := kept[place]) is not None]
        return torch.cat([piece.to(device, non_blocking=True) for piece in pieces])


def _wanted(pairs: Pairs, reference: bool | Tensor) -> Pairs | None:
    """The pairs whose reference is asked for, None if there is none."""
    if isinstance(reference, Tensor):
        flags = reference.tolist()
        wanted = pairs.only({(row, column) for row, column in pairs.places if flags[row][column]})
        return wanted if wanted.places else None
    return pairs if reference else None


def _summed(
    pairs: Pairs,
    wanted: Pairs | None,
    log_likelihood: Tensor,
    kl: Tensor | None = None,
    reference_log_likelihood: Tensor | None = None,
) -> ResponseStatistics:
    """Sums and means over each response's tokens, from (n,) and, for what is wanted, (m,)."""

    def per_response(tokens: Tensor, owners: Pairs) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(owners.response_lengths, device=tokens.device)
        places = torch.arange(owners.widths[1], device=tokens.device)
        mask = places < lengths[..., None]  # (B, R, T)
        sums = tokens.new_zeros(mask.shape).masked_scatter(mask, tokens).sum(-1)
        return sums, sums / lengths.clamp(min=1)

    sums, means = per_response(log_likelihood, pairs)
    lengths = torch.tensor(pairs.response_lengths, device=sums.device)
    if wanted is None or kl is None or reference_log_likelihood is None:
        return ResponseStatistics(sums, means, lengths)
    _, divergence = per_response(kl, wanted)
    return ResponseStatistics(
        sums, means, lengths, divergence, *per_response(reference_log_likelihood, wanted)
    )


def _probe(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Two samples with two responses each: the longest of the batch and another.

    What the batch lacks is made up, so that a method which lets samples or responses see each other
    cannot pass: the same prompt cut in half, the first response read backwards.
    """
    prompts, responses = batch["prompt_lengths"].cpu(), batch["response_lengths"].cpu()
    order = (prompts + responses.sum(1)).argsort(descending=True)
    order = order[responses[order].sum(1) > 0]
    rows = order[:2] if len(order) > 1 else order.repeat(2)
    rows = rows.to(batch["prompt_ids"].device)
    names = ("prompt_ids", "prompt_lengths", "response_ids", "response_lengths")
    probe = {name: batch[name].to(rows.device)[rows] for name in names}  # lengths may be elsewhere
    if len(order) == 1:
        half = probe["prompt_lengths"][1] // 2
        probe["prompt_lengths"][1] = half.clamp(min=1)
    if (probe["response_lengths"] > 0).sum(1).max() < 2:
        first = probe["response_lengths"].argmax(1)
        here = torch.arange(2, device=rows.device)
        ids, lengths = probe["response_ids"][here, first], probe["response_lengths"][here, first]
        places = torch.arange(ids.shape[1], device=rows.device)
        backwards = (lengths[:, None] - 1 - places).clamp(min=0)
        probe["response_ids"] = torch.stack([ids, ids.gather(1, backwards)], 1)
        probe["response_lengths"] = torch.stack([lengths, lengths], 1)
    return probe


def _tolerance(model: nn.Module) -> float:
    """How far two correct ways may differ, relative to 1 + |value| of a token mean."""
    weight = next(weight for weight in base_of(model).parameters() if weight.ndim > 1)
    low = any(
        not weight.is_floating_point() or weight.dtype.itemsize < 4
        for weight in base_of(model).parameters()
    )
    if low:
        return 3e-2
    return 1e-4 if weight.device.type == "cpu" else 2e-3  # an accelerator may round to TF32


def _disagreement(
    fast: ResponseStatistics, plain: ResponseStatistics, tolerance: float
) -> str | None:
    """What differs by more than the tolerance where the plain value is finite, or None."""
    for name in ("mean_log_likelihood", "reference_mean_log_likelihood", "kl"):
        value, expected = getattr(fast, name), getattr(plain, name)
        if expected is None:
            continue
        finite = expected.isfinite()
        error = ((value - expected).abs() / (1 + expected.abs()))[finite]
        if not (error <= tolerance).all():  # so that NaN does not pass
            return (
                f"its {name.replace('_', ' ')} differs from the plain method's by "
                f"{error.max():.1e}, relative to 1 + |value|; {tolerance:.0e} is what rounding "
                "explains"
            )
    return None
