"""Log-likelihoods of responses and their divergence from the reference policy.

Given a batch of prompts and several responses to each (batch.py), :class:`ResponseScorer` computes,
teacher-forced and in float32, each response's log-likelihood and KL(π_θ ‖ π_ref) at its positions,
differentiable in the policy. Three scoring methods differ in cost and in nothing else:

    plain          a whole sequence for each pair, all its logits; any model
    chunked        a whole sequence for each pair, those of like length together, logits only where
                   a response is predicted and in chunks (vocabulary.py); any model with a separate
                   vocabulary layer
    shared_prompt  as chunked, the prompt once for all its responses (shared_prompt.py)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from pl_pointwise.errors import TrainingError, one_of
from pl_pointwise.task import Batch
from pl_pointwise.tasks.common.lengths import forward_cost, like_length_groups

from .batch import Pairs, collate_responses
from .shared_prompt import LAYOUT, install, uninstall
from .vocabulary import (
    CHUNK_ELEMENTS,
    TokenStatistics,
    VocabularyHead,
    chunked_token_statistics,
    decoder_of,
    log_softmax,
    token_statistics,
)

log = logging.getLogger(__name__)

ScoringMethod = Literal["shared_prompt", "chunked", "plain"]
ADAPTED = (BaseTunerLayer, AuxiliaryTrainingWrapper)
"""What PEFT puts in the place of a layer."""
REFERENCE = "reference"
"""The name of an adapter that is the reference policy, where one is trained on; else there is none,
and the reference is the model with its adapters off."""


@dataclass(frozen=True)
class ResponseStatistics:
    """Per (prompt, response), float32 or wider; 0 where there is no response.

    With s the sum over the response's tokens, end token included, and s̄ their mean:
    """

    log_likelihood: Tensor  # (B, R)  s = log π(y|x)
    mean_log_likelihood: Tensor  # (B, R)  s̄ = s / |y|
    lengths: Tensor  # (B, R)  |y| in tokens, 0 where there is no response
    # (B, R)  mean over tokens of KL(π ‖ π_ref); 0 where not asked for
    kl: Tensor | None = None
    reference_log_likelihood: Tensor | None = None  # (B, R)  s_ref
    reference_mean_log_likelihood: Tensor | None = None  # (B, R)  s̄_ref
    # (B, R)  the least over tokens of log π(y_t) − the largest other
    lead: Tensor | None = None

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
            # layers are numbered
            in_a_layer = any(part.isdigit() for part in name.split("."))
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
        self.base = base_of(model)
        self.method = method
        self.cache = cache
        self.chunk_elements = chunk_elements
        # The others take the attention that the model was loaded with.
        if method == "shared_prompt":
            install(self.base)

    def __call__(
        self, batch: Batch, reference: bool | Tensor = True, leads: bool = False
    ) -> ResponseStatistics:
        """Statistics of every response in a batch (batch.py), differentiable in the policy.

        reference: (B, R) bool asks for it of some of the responses only, and costs only those.
        leads: whether to tell how far each token is ahead of every other.
        """
        pairs = Pairs.of(batch)
        # On the first batch, as only real token ids show what the model does with them.
        if self.method == "auto":
            self.method = self.choose_method(batch)
        wanted = pairs if reference is not False else None
        # Responses without KL and without a relative bound need no second forward pass.
        if isinstance(reference, Tensor):
            flags = reference.tolist()
            asked = {place for place in pairs.places if flags[place[0]][place[1]]}
            wanted = pairs.only(asked) if asked else None
        tokens = self._plain if self.method == "plain" else self._chunked
        return _summed(pairs, wanted, tokens(pairs, wanted, leads))

    def choose_method(self, batch: Batch) -> ScoringMethod:
        """The fastest way that agrees with the plain one; what is refused, and why, is logged.

        On the longest pair of the batch: twice in one sample and once more in another, so that a
        response which sees its neighbour shows. In float32 where the weights are, as half precision
        would hide a shift by one position.
        """
        pairs = Pairs.of(batch)
        prompts = pairs.prompt_lengths
        responses = pairs.response_lengths
        row, column = max(
            pairs.places, key=lambda p: prompts[p[0]] + responses[p[0]][p[1]]
        )
        prompt = pairs.prompt_ids[row, : prompts[row]].tolist()
        response = pairs.response_ids[row, column, : responses[row][column]].tolist()
        thrice = collate_responses([prompt, prompt], [[response, response], [response]])
        on_device = {
            name: part.to(pairs.prompt_ids.device) for name, part in thrice.items()
        }
        pairs = Pairs.of(on_device)
        once = pairs.only({(0, 0)})
        has_reference = reference_problem(self.model) is None
        chosen: ScoringMethod = "plain"
        methods: tuple[ScoringMethod, ...] = ("shared_prompt", "chunked")
        device = pairs.prompt_ids.device.type
        # TF32 rounds factors to 10 bits, and two right ways differ by that.
        exact = torch.get_float32_matmul_precision() == "highest"
        exact = exact and all(
            weight.dtype.itemsize >= 4 for weight in self.model.parameters()
        )
        # How far two right ways may differ, relative to 1 + |value|.
        bound = (1e-4 if device == "cpu" else 1e-3) if exact else 0.1
        mixed = torch.autocast(
            device, enabled=torch.is_autocast_enabled(device) and not exact
        )
        with inference(self.model), mixed:
            wanted = once if has_reference else None
            plain = _summed(once, wanted, self._plain(once, wanted))
            for method in methods:
                try:
                    trial = ResponseScorer(
                        self.model, method, chunk_elements=self.chunk_elements
                    )
                    wanted = pairs if has_reference else None
                    fast = _summed(pairs, wanted, trial._chunked(pairs, wanted))
                    problem = value_problem(fast, plain, bound)
                except Exception as error:
                    # whatever a model may raise that was not built for this
                    problem = f"{type(error).__name__}: {error}"
                # The methods stand in the order of their speed.
                if problem is None:
                    chosen = method
                    break
                uninstall(self.base)
                log.warning('The scoring method "%s" is not used: %s.', method, problem)
        log.info(
            'Response log-likelihoods are computed by the scoring method "%s".', chosen
        )
        return chosen

    def _plain(
        self, pairs: Pairs, wanted: Pairs | None, leads: bool = False
    ) -> TokenStatistics:
        """From full logits; the others' yardstick."""

        def logits_of(pairs: Pairs) -> Tensor:
            ids, mask, predicting = pairs.sequences()
            logits = self.model(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).logits
            of_responses: Tensor = logits.flatten(0, 1)[predicting]
            return of_responses

        logits = logits_of(pairs)
        statistics = token_statistics(log_softmax(logits), pairs.targets, leads=leads)
        if wanted is None:
            return statistics
        with inference(self.model, reference=True):
            reference = log_softmax(logits_of(wanted))
        policy = log_softmax(logits[wanted.within(pairs)])
        beside = token_statistics(policy, wanted.targets, reference)
        return statistics._replace(
            divergence=beside.divergence, reference=beside.reference
        )

    def _chunked(
        self, pairs: Pairs, wanted: Pairs | None, leads: bool = False
    ) -> TokenStatistics:
        """The same from hidden states at the predicting positions only, logits in chunks."""
        reference = None if wanted is None else self._reference_hidden(wanted)
        hidden = self._hidden(pairs)
        head = VocabularyHead(self.base)
        options: dict[str, Any] = {
            "chunk_elements": self.chunk_elements,
            "leads": leads,
        }
        if isinstance(head.linear, ADAPTED):  # Then it is not the reference's.
            options["reference_mode"] = partial(inference, self.model, reference=True)
        reference = None if reference is None else reference.to(hidden.dtype)
        # All or none have a reference: the order of the tokens is right as it is.
        if wanted is None or wanted is pairs:
            return chunked_token_statistics(
                head, hidden, pairs.targets, reference, **options
            )
        others = pairs.only(set(pairs.places) - set(wanted.places))
        # Not by a bool mask, whose count of tokens the host would wait for.
        order = torch.cat([wanted.within(pairs), others.within(pairs)])
        rows = hidden.index_select(0, order)
        targets = pairs.targets.index_select(0, order)
        statistics = chunked_token_statistics(head, rows, targets, reference, **options)
        back = order.argsort()
        lead = (
            None if statistics.lead is None else statistics.lead.index_select(0, back)
        )
        likelihood = statistics.log_likelihood.index_select(0, back)
        return statistics._replace(log_likelihood=likelihood, lead=lead)

    def _hidden(self, pairs: Pairs) -> Tensor:
        """Last hidden states (n, H) at the places that predict a response token."""
        decoder = decoder_of(self.base)
        # Whole sequences, each on its own: models that refuse the shared prompt's mask.
        if self.method == "chunked":
            return self._hidden_in_groups(pairs)
        layout = pairs.layout
        token = LAYOUT.set(layout)
        try:
            outputs = decoder(
                input_ids=layout.ids[None],
                # with a mask, transformers does not take the row for several packed sequences
                attention_mask=torch.ones_like(layout.ids[None]),
                position_ids=layout.positions[None],
                use_cache=False,
            )
        finally:
            LAYOUT.reset(token)
        return outputs.last_hidden_state[0, layout.predicting]

    def _hidden_in_groups(self, pairs: Pairs) -> Tensor:
        """The same of whole sequences, group by group of like length: few are padded far."""
        decoder = decoder_of(self.base)
        device = pairs.prompt_ids.device
        prompts = [pairs.prompt_lengths[row] for row, _ in pairs.places]
        lengths = torch.tensor(prompts) + torch.tensor(pairs.sizes)
        pieces = list[Tensor]()
        places = list[Tensor]()
        for group in like_length_groups(lengths, forward_cost(device)):
            some = pairs.only({pairs.places[number] for number in group.tolist()})
            ids, mask, predicting = some.sequences()
            outputs = decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            pieces.append(outputs.last_hidden_state.flatten(0, 1)[predicting])
            places.append(some.within(pairs))
        # One group is in order already.
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces).index_select(0, torch.cat(places).argsort())

    def _reference_hidden(self, wanted: Pairs) -> Tensor:
        """Last hidden states (m, H) of the reference, from the cache as far as it has them."""
        # Computed in every step, as nothing is kept.
        if self.cache is None:
            with inference(self.model, reference=True):
                return self._hidden(wanted)
        prompts = wanted.prompt_ids.cpu()
        responses = wanted.response_ids.cpu()
        keys = {}
        for row, column in wanted.places:
            prompt = prompts[row, : wanted.prompt_lengths[row]]
            response = responses[row, column, : wanted.response_lengths[row][column]]
            keys[row, column] = (prompt.numpy().tobytes(), response.numpy().tobytes())
        missing = wanted.only(
            {place for place, key in keys.items() if key not in self.cache}
        )
        # In the first epoch all, later none but of resumed runs.
        if missing.places:
            with inference(self.model, reference=True):
                hidden = self._hidden(missing)
            for place, piece in zip(
                missing.places, hidden.split(missing.sizes), strict=True
            ):
                kept = piece.detach().to("cpu", self.cache.dtype, copy=True)
                self.cache[keys[place]] = kept.contiguous()
        device = wanted.prompt_ids.device
        return torch.cat(
            [self.cache[key].to(device, non_blocking=True) for key in keys.values()]
        )


def value_problem(
    fast: ResponseStatistics, plain: ResponseStatistics, bound: float
) -> str | None:
    """Which statistic of a pair, the first of ``plain``, some copy of it in ``fast`` has not."""
    for name in ("mean_log_likelihood", "reference_mean_log_likelihood", "kl"):
        right = getattr(plain, name)
        # Without adapters there are no statistics of a reference.
        if right is None:
            continue
        copies = getattr(fast, name)[fast.present]
        expected = right[0, 0]
        # NaN is not close.
        if not copies.isclose(expected, rtol=bound, atol=bound).all():
            return f"its {name} differs from the plain method's: {copies.tolist()}, {expected}"
    return None


def _summed(
    pairs: Pairs, wanted: Pairs | None, of_tokens: TokenStatistics
) -> ResponseStatistics:
    """Sums, means and least ones over the tokens of each response, 0 where there is none."""

    # (B, R, T)
    def by_response(tokens: Tensor, owners: Pairs, filler: float = 0) -> Tensor:
        sizes = torch.tensor(owners.response_lengths).to(
            tokens.device, non_blocking=True
        )
        mask = (
            torch.arange(owners.response_ids.shape[2], device=tokens.device)
            < sizes[..., None]
        )
        return tokens.new_full(mask.shape, filler).masked_scatter(mask, tokens)

    sums = by_response(of_tokens.log_likelihood, pairs).sum(-1)
    lengths = torch.tensor(pairs.response_lengths).to(sums.device, non_blocking=True)
    sizes = lengths.clamp(min=1)
    statistics = ResponseStatistics(sums, sums / sizes, lengths)
    # Only a constraint on the lead asks for it: it costs one more pass over the logits.
    if of_tokens.lead is not None:
        least = by_response(of_tokens.lead, pairs, torch.inf).amin(-1)
        statistics = replace(statistics, lead=torch.where(lengths > 0, least, 0))
    if wanted is None or of_tokens.divergence is None or of_tokens.reference is None:
        return statistics
    divergence = by_response(of_tokens.divergence, wanted).sum(-1)
    reference = by_response(of_tokens.reference, wanted).sum(-1)
    return replace(
        statistics,
        kl=divergence / sizes,
        reference_log_likelihood=reference,
        reference_mean_log_likelihood=reference / sizes,
    )


# The reference policy: the same weights with the adapters off -------------------------------------


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model, without a PEFT wrapper around it (adapted layers stay inside)."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), (
        f"not a transformers model: {type(base).__name__}"
    )
    return base


@contextmanager
def inference(model: nn.Module, reference: bool = False) -> Iterator[None]:
    """Evaluation mode, no gradients; for the reference adapters off. Left as it was found."""
    problem = reference_problem(model) if reference else None
    if problem:
        raise TrainingError(problem)
    in_training = [part for part in model.modules() if part.training]
    trainable = [(weight, weight.requires_grad) for weight in model.parameters()]
    off = _reference_adapters(model) if reference else nullcontext()
    try:
        for part in in_training:
            part.training = False
        with torch.no_grad(), off:
            yield
    finally:
        for part in in_training:
            part.training = True
        # PEFT turns every adapter's gradient on again
        for weight, requires_grad in trainable:
            weight.requires_grad_(requires_grad)


@contextmanager
def _reference_adapters(model: nn.Module) -> Iterator[None]:
    """The adapters of the reference policy in the place of those that are trained."""
    assert isinstance(model, PeftModel)
    # A fresh adapter: the reference is the base. With continue_adapter it is a frozen copy.
    if REFERENCE not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    trained = model.active_adapter
    model.set_adapter(REFERENCE)
    try:
        yield
    finally:
        model.set_adapter(trained)


def reference_problem(model: nn.Module) -> str | None:
    """Why the model with its adapters off is not a fixed reference policy, or None if it is."""
    if not isinstance(model, PeftModel):
        return (
            "The reference policy is the model with its adapters off, and this model has no "
            "adapters (policy.lora is null). Train adapters, or take an objective and constraints "
            "without a reference, such as cross_entropy."
        )
    for name, weight in model.named_parameters():
        # modules_to_save is the adapter's; a bias that LoRA's bias: all trains is the base's.
        if weight.requires_grad and not of_adapter(model, name):
            return (
                f"The reference policy would move: base weights are trained (as {name}). Freeze "
                "them, or ask for no reference."
            )
    return None


def of_adapter(model: nn.Module, name: str) -> bool:
    """Whether a parameter is a trained adapter's, by the names that PEFT gives them."""
    if not isinstance(model, PeftModel) or REFERENCE in name.split("."):
        return False
    prefix = getattr(model.base_model, "prefix", "lora_")
    return any(
        part in name for part in (prefix, "modules_to_save.", "trainable_tokens_")
    )
