"""Log-likelihoods of responses and their divergence from the reference policy.

Given a batch of prompts and several responses to each (batch.py), :class:`ResponseScorer` computes,
teacher-forced and in float32, each response's log-likelihood and KL(π_θ ‖ π_ref) at its positions,
differentiable in the policy. Three scoring methods differ in cost and in nothing else:

    plain          a whole sequence for each pair, all its logits; any model
    chunked        a whole sequence for each pair, logits only where a response is predicted and
                   in chunks (vocabulary.py); any model with a separate vocabulary layer
    shared_prompt  as chunked, the prompt once for all its responses (shared_prompt.py)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pl_pointwise.errors import one_of
from pl_pointwise.task import Batch, evaluation_mode

from ..model.adapters import ADAPTED, adapters_off, base_of, reference_problem
from .batch import Pairs, collate_responses
from .shared_prompt import Layout, install, layout_in_use, uninstall
from .vocabulary import (
    CHUNK_ELEMENTS,
    TokenStatistics,
    VocabularyHead,
    chunked_token_statistics,
    decoder_of,
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
    reference_log_likelihood: Tensor | None = None  # (B, R)  s_ref
    reference_mean_log_likelihood: Tensor | None = None  # (B, R)  s̄_ref
    lead: Tensor | None = None  # (B, R)  the least over tokens of log π(y_t) − the largest other

    @property
    def present(self) -> Tensor:
        """(B, R) bool: where there is a response."""
        return self.lengths > 0


class ReferenceCache(dict[tuple[bytes, bytes], Tensor]):
    """Last hidden states of the reference policy, (T, H) on the CPU by (prompt, response).

    The keys are the token ids as bytes, so another record or chat template is another key.

    They are read through the vocabulary layer as in training, so nothing outside the repeated
    layers may be adapted.

    Args:
        model: with adapters.
        dtype: how to keep them. bfloat16 takes half the space of float32, which is exact, and moved
            a KL by 1e-4 to 5e-4 in trials, a tenth of what computing in bfloat16 does.

    Raises:
        ValueError: no fixed reference, or one whose hidden states are not enough.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        if problem := reference_problem(model):
            raise ValueError(problem)
        for name, module in model.named_modules():
            in_a_layer = any(part.isdigit() for part in name.split("."))  # layers are numbered
            if isinstance(module, ADAPTED) and not in_a_layer:
                raise ValueError(
                    f"The reference's hidden states are not kept: {name} is adapted, and they are "
                    "only valid where head, embeddings and final norm stay as they are."
                )
        self.dtype = dtype


class ResponseScorer:
    """Response statistics of a causal language model, by the fastest way that is right for it.

    Args:
        model: with adapters if a reference is wanted.
        method: "auto" compares on the first batch.
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
        one_of("method", method, ("auto", *get_args(ScoringMethod)))
        self.model = model
        self.method = method
        self.cache = cache
        self.chunk_elements = chunk_elements
        if method == "shared_prompt":
            install(base_of(model))

    def __call__(
        self, batch: Batch, reference: bool | Tensor = True, leads: bool = False
    ) -> ResponseStatistics:
        """Statistics of every response in a batch (batch.py), differentiable in the policy.

        reference: (B, R) bool asks for it of some of the responses only, and costs only those.
        leads: whether to tell how far each token is ahead of every other.
        """
        pairs = Pairs.of(batch)
        if self.method == "auto":
            self.method = self.choose_method(batch)
        wanted: Pairs | None = None if reference is False else pairs
        if isinstance(reference, Tensor):
            flags = reference.tolist()
            wanted = pairs.only({place for place in pairs.places if flags[place[0]][place[1]]})
        return self._statistics(pairs, wanted if wanted and wanted.places else None, leads)

    def choose_method(self, batch: Batch) -> ScoringMethod:
        """The fastest way that agrees with the plain one; what is refused, and why, is logged.

        On the longest pair of the batch: twice in one sample and once more in another, so that a
        response which sees its neighbour shows. In float32 where the weights are, as half precision
        would hide a shift by one position.
        """
        pairs, base = Pairs.of(batch), base_of(self.model)
        row, column = max(pairs.places, key=lambda p: pairs.prompt_lengths[p[0]] + pairs.length(*p))
        prompt = pairs.prompt_ids[row, : pairs.prompt_lengths[row]].tolist()
        response = pairs.response_ids[row, column, : pairs.length(row, column)].tolist()
        thrice = collate_responses([prompt, prompt], [[response, response], [response]])
        pairs = Pairs.of({name: each.to(pairs.prompt_ids.device) for name, each in thrice.items()})
        once = pairs.only({(0, 0)})
        own = reference_problem(self.model) is None
        chosen: ScoringMethod = "plain"
        methods: tuple[ScoringMethod, ...] = ("shared_prompt", "chunked")
        device = pairs.prompt_ids.device.type
        exact = torch.get_float32_matmul_precision() == "highest"
        exact = exact and all(weight.dtype.itemsize >= 4 for weight in self.model.parameters())
        # How far two right ways may differ, relative to 1 + |value|.
        bound = (1e-4 if device == "cpu" else 1e-3) if exact else 0.1
        mixed = torch.autocast(device, enabled=torch.is_autocast_enabled(device) and not exact)
        with evaluation_mode(self.model), torch.no_grad(), mixed:
            plain = _summed(once, once if own else None, self._plain(once, once if own else None))
            for method in methods:
                try:
                    trial = ResponseScorer(self.model, method, chunk_elements=self.chunk_elements)
                    fast = trial._statistics(pairs, pairs if own else None)
                    problem = value_problem(fast, plain, bound)
                except Exception as error:  # whatever a model may raise that was not built for this
                    problem = f"{type(error).__name__}: {error}"
                if problem is None:
                    chosen = method
                    break
                uninstall(base)
                log.warning('The scoring method "%s" is not used: %s.', method, problem)
        log.info('Response log-likelihoods are computed by the scoring method "%s".', chosen)
        return chosen

    def _statistics(
        self, pairs: Pairs, wanted: Pairs | None, leads: bool = False
    ) -> ResponseStatistics:
        tokens = self._plain if self.method == "plain" else self._chunked
        return _summed(pairs, wanted, tokens(pairs, wanted, leads))

    def _plain(self, pairs: Pairs, wanted: Pairs | None, leads: bool = False) -> TokenStatistics:
        """From full logits; the others' yardstick."""

        def logits_of(pairs: Pairs) -> Tensor:
            ids, mask, predicting = pairs.sequences()
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            found: Tensor = logits.flatten(0, 1)[predicting]
            return found

        logits = logits_of(pairs)
        found = token_statistics(logits, pairs.targets, leads=leads)
        if wanted is None:
            return found
        with adapters_off(self.model):
            reference = logits_of(wanted)
        some = token_statistics(logits[wanted.within(pairs)], wanted.targets, reference)
        return found._replace(divergence=some.divergence, reference=some.reference)

    def _chunked(self, pairs: Pairs, wanted: Pairs | None, leads: bool = False) -> TokenStatistics:
        """The same from hidden states at the predicting positions only, logits in chunks."""
        reference = None if wanted is None else self._reference_hidden(wanted)
        hidden = self._hidden(pairs)
        base = base_of(self.model)
        head = VocabularyHead(base)
        options: dict[str, Any] = {"chunk_elements": self.chunk_elements, "leads": leads}
        if isinstance(base.get_output_embeddings(), ADAPTED):  # Then it is not the reference's.
            options["reference_mode"] = partial(adapters_off, self.model)
        reference = None if reference is None else reference.to(hidden.dtype)
        if wanted is None or len(wanted.targets) == len(pairs.targets):
            return chunked_token_statistics(head, hidden, pairs.targets, reference, **options)
        others = pairs.only(set(pairs.places) - set(wanted.places))
        # Not by a bool mask, whose count of tokens the host would wait for.
        order = torch.cat([wanted.within(pairs), others.within(pairs)])
        rows, back = hidden.index_select(0, order), order.argsort()
        targets = pairs.targets.index_select(0, order)
        found = chunked_token_statistics(head, rows, targets, reference, **options)
        lead = None if found.lead is None else found.lead.index_select(0, back)
        likelihood = found.log_likelihood.index_select(0, back)
        return found._replace(log_likelihood=likelihood, lead=lead)

    def _hidden(self, pairs: Pairs) -> Tensor:
        """Last hidden states (n, H) at the places that predict a response token."""
        decoder = decoder_of(base_of(self.model))
        if self.method == "chunked":
            ids, mask, predicting = pairs.sequences()
            outputs = decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            return outputs.last_hidden_state.flatten(0, 1)[predicting]
        layout = Layout.of(pairs)
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
        prompts, responses = wanted.prompt_ids.cpu(), wanted.response_ids.cpu()
        keys = {}
        for row, column in wanted.places:
            prompt = prompts[row, : wanted.prompt_lengths[row]]
            response = responses[row, column, : wanted.length(row, column)]
            keys[row, column] = prompt.numpy().tobytes(), response.numpy().tobytes()
        missing = wanted.only({place for place, key in keys.items() if key not in self.cache})
        if missing.places:
            with adapters_off(self.model):
                hidden = self._hidden(missing)
            sizes = [missing.length(*place) for place in missing.places]
            for place, piece in zip(missing.places, hidden.split(sizes), strict=True):
                kept = piece.detach().to("cpu", self.cache.dtype, copy=True)
                self.cache[keys[place]] = kept.contiguous()
        device = wanted.prompt_ids.device
        return torch.cat([self.cache[key].to(device, non_blocking=True) for key in keys.values()])


def value_problem(fast: ResponseStatistics, plain: ResponseStatistics, bound: float) -> str | None:
    """Which statistic of a pair, the first of ``plain``, some copy of it in ``fast`` has not."""
    for name in ("mean_log_likelihood", "reference_mean_log_likelihood", "kl"):
        if (right := getattr(plain, name)) is not None:
            found, expected = getattr(fast, name)[fast.present], right[0, 0]
            if not found.isclose(expected, rtol=bound, atol=bound).all():  # NaN is not close.
                return f"its {name} differs from the plain method's: {found.tolist()}, {expected}"
    return None


def _summed(pairs: Pairs, wanted: Pairs | None, found: TokenStatistics) -> ResponseStatistics:
    """Sums, means and least ones over the tokens of each response, 0 where there is none."""

    def by_response(tokens: Tensor, owners: Pairs, filler: float = 0) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(owners.response_lengths).to(tokens.device, non_blocking=True)
        mask = torch.arange(owners.response_ids.shape[2], device=tokens.device) < lengths[..., None]
        return tokens.new_full(mask.shape, filler).masked_scatter(mask, tokens), lengths

    def summed(tokens: Tensor, owners: Pairs) -> tuple[Tensor, Tensor, Tensor]:
        padded, lengths = by_response(tokens, owners)
        return (sums := padded.sum(-1)), sums / lengths.clamp(min=1), lengths

    sums, means, lengths = summed(found.log_likelihood, pairs)
    own = ResponseStatistics(sums, means, lengths)
    if found.lead is not None:
        least = by_response(found.lead, pairs, torch.inf)[0].amin(-1)
        own = replace(own, lead=torch.where(lengths > 0, least, 0))
    if wanted is None or found.divergence is None or found.reference is None:
        return own
    kl, (sums, means, _) = summed(found.divergence, wanted)[1], summed(found.reference, wanted)
    return replace(own, kl=kl, reference_log_likelihood=sums, reference_mean_log_likelihood=means)
