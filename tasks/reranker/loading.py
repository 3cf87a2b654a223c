"""The cross-encoder and its tokenizer: with a head of its own, a new one, or one made of words.

A causal model that answers a question about a pair in one word, as Qwen3-Reranker and mxbai-rerank
v2 do, scores with its logits of that word:

    s = logit("yes") − logit("no") = (W_yes − W_no) · h,   or W_yes · h where one word is given

W is its vocabulary layer and h the last hidden state of the last token. So it becomes a model with
a head of one label, exactly. An adapter is merged into its base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pl_pointwise.tasks.common.adapters import SavedAdapter, saved_adapter, whole_model
from pl_pointwise.tasks.common.models import pretrained

from .export import CONFIG

Attention = Literal["eager", "sdpa", "flash_attention_2"]
_HEADS = {"score", "classifier"}  # transformers' names of them


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; of an adapter without one its base's. It has a token to pad with.

    Raises:
        ValueError: it has neither a pad token nor an end token.
    """
    adapter = saved_adapter(name)
    # PEFT saves no tokenizer; TRL's and this package's exports do.
    if adapter is not None and not (adapter.folder / "tokenizer_config.json").is_file():
        return load_tokenizer(adapter.base)
    tokenizer: PreTrainedTokenizerBase = pretrained(AutoTokenizer, name)
    if tokenizer.pad_token_id is None:
        # A decoder's score is that of the last token which is no padding: rather not its end token.
        known = map(str, tokenizer.get_added_vocab())
        tokenizer.pad_token = next(
            (t for t in known if "pad" in t.lower()), tokenizer.eos_token
        )
    return tokenizer


def load_cross_encoder(
    model_name: str,
    dropout: float | None = None,
    attention: Attention | None = None,
    head: Sequence[str | bool | int] | None = None,
) -> PreTrainedModel:
    """The model with its own head of one or two labels, one made of words, or a new one.

    A new head depends on the seed of the run (`seed_everything`) alone, not on how many random
    numbers were drawn before, so that methods compared at one seed start from the same weights.

    head: one or two words, see the top.
    """
    adapter = saved_adapter(model_name)
    words = None if head is None else _words(head)

    def load(name: str, revision: str | None) -> PreTrainedModel:
        return _base(name, revision, adapter, dropout, attention, words)

    # The model is whole, with a head or without.
    if adapter is None:
        model = load(model_name, None)
    else:
        model = adapter.merged_into(adapter.load_base(load))
    try:
        tokenizer = load_tokenizer(model_name)
    except (OSError, ValueError):
        if words is not None:
            raise
        tokenizer = None  # A folder of weights alone: the data name another.
    if words is not None and tokenizer is not None:
        model = with_head_of_words(model, tokenizer, words, model_name)
    model.config.problem_type, model.config.sentence_transformers = None, CONFIG
    if tokenizer is not None:
        agree_on_padding(model, tokenizer)
    # loaded in evaluation mode, and Lightning keeps the mode it finds
    return model.train()


def _base(
    name: str,
    revision: str | None,
    adapter: SavedAdapter | None,
    dropout: float | None,
    attention: Attention | None,
    head: Sequence[str] | None,
) -> PreTrainedModel:
    """The whole model of a name, with dropout set, and a head that fits the adapter's."""
    base_adapter = saved_adapter(name, revision) if adapter is not None else None
    # An adapter of an adapter: merged_into() knows one base.
    if base_adapter is not None:
        raise ValueError(f"{name} is an adapter too. Merge it into its base first.")
    config = pretrained(AutoConfig, name, revision=revision)
    # A head of words takes the place of any head of labels.
    if head is None:
        _set_labels(config, name, adapter)
    if dropout is not None:
        names = [
            option
            for option in vars(config)
            if "dropout" in option or option.endswith("pdrop")
        ]
        # A setting that the model does not read would do nothing, in silence.
        if not names:
            raise ValueError(
                f"dropout={dropout}: {name} has none to set; leave it out."
            )
        for option in names:
            setattr(config, option, dropout)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed())
        model: PreTrainedModel = whole_model(
            AutoModelForSequenceClassification
            if head is None
            else AutoModelForCausalLM,
            name,
            revision,
            config=config,
            attn_implementation=attention,
            dtype=torch.float32,
        )
    return model


def _set_labels(
    config: PreTrainedConfig, name: str, adapter: SavedAdapter | None
) -> None:
    """The labels of the model's head, or the adapter's; one where neither has a head."""
    kinds = config.architectures or []
    labels = (
        [config.num_labels] if any("ForSequenceCl" in kind for kind in kinds) else []
    )
    if adapter is not None:
        name = adapter.name
        labels = _labels_of(adapter) or labels
    if not labels:
        config.num_labels = 1
        words = " Of one that answers in words, such as Qwen3-Reranker, set model.head to them."
        causal = any(kind.endswith("ForCausalLM") for kind in kinds)
        rank_zero_info(
            f"{name} has no classification head: it gets a new one, untrained.{words * causal}"
        )
    # A classifier of sentiments or of entailment: its classes say nothing of relevance.
    elif labels[0] not in (1, 2):
        raise ValueError(
            f"{name} has a head of {labels[0]} labels. A re-ranker needs one label, "
            "or two with score = logit 1 − logit 0: take such a model, or the encoder without head."
        )
    else:
        config.num_labels = labels[0]


def _labels_of(adapter: SavedAdapter) -> list[int]:
    """The labels of the head that an adapter saved whole; [] where it saved none.

    A head may have a layer in front of its last one, which has more outputs.
    """
    outputs = [
        shape[0]
        for name, shape in adapter.shapes.items()
        if name.endswith(".weight")
        and "lora_" not in name
        and _HEADS.intersection(name.split("."))
    ]
    return [min(outputs)] if outputs else []


# A head of words ----------------------------------------------------------------------------------


def _words(head: Sequence[str | bool | int]) -> list[str]:
    """The words of a head; ValueError of none, more than two, or what YAML made of them."""
    # str(True) is "True", a token of its own in most vocabularies.
    if any(isinstance(word, bool) for word in head):
        raise ValueError(
            'head: YAML reads yes and no as true and false. Put them in quotes: ["yes", "no"].'
        )
    if not 1 <= len(head) <= 2:
        raise ValueError(
            f"head={list(head)}: give one word, or two: the right one first."
        )
    return [str(word) for word in head]


def with_head_of_words(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words: Sequence[str],
    name: str,
) -> PreTrainedModel:
    """A causal model as one with a head of one label, its logit of a word, or that less another's.

    Raises:
        ValueError: a word is several tokens, or the model does more to its logits than a product.
    """
    tokens = [_token_of(tokenizer, word) for word in words]
    vocabulary = model.get_output_embeddings()
    assert vocabulary is not None
    rows = vocabulary.weight.detach()[tokens]
    weight = rows[0] if len(rows) == 1 else rows[0] - rows[1]
    config, decoder = model.config, model.get_decoder()
    config.num_labels = 1
    # Of the classifier only its shape is needed; the weights are the causal model's.
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"head: {type(classifier).__name__} has no head that words can be put into."
        )
    setattr(classifier, classifier.base_model_prefix, decoder)
    classifier.score = nn.Linear(len(weight), 1, bias=False)
    classifier.score.weight = nn.Parameter(weight[None].clone())
    classifier.config = config
    _check_equal(model, classifier, tokens, name)
    assert isinstance(classifier, PreTrainedModel)
    return classifier.requires_grad_(True)


def _token_of(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    ids: list[int] = tokenizer(word, add_special_tokens=False)["input_ids"]
    # A head has one row a label, which is that of one token.
    if len(ids) != 1:
        raise ValueError(
            f"head: {word!r} is {len(ids)} tokens {tokenizer.convert_ids_to_tokens(ids)}. Give a "
            "word that is one."
        )
    return ids[0]


def _check_equal(causal: Any, classifier: Any, tokens: list[int], name: str) -> None:
    """Refuses a model whose logits are capped, scaled or shifted: no head of words gives these."""
    rows = len(causal.get_input_embeddings().weight)
    ids = torch.arange(1, 9)[None] % rows
    with torch.no_grad():
        logits = causal.eval()(input_ids=ids, use_cache=False).logits[0, -1].double()
        score = classifier.eval()(input_ids=ids).logits[0, 0].double()
    expected = logits[tokens[0]] - (logits[tokens[1]] if len(tokens) == 2 else 0)
    if not torch.isclose(score, expected, rtol=1e-4, atol=1e-4):
        raise ValueError(
            f"head: {name} does more to its logits than a product with its vocabulary (a cap, a "
            f"scale, a bias): {float(expected):.4g}, not {float(score):.4g}. Take it without head."
        )


def agree_on_padding(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Lets the model know the token that batches are padded with, and its export say so.

    A decoder reads its score at the last token that is not this one. Encoders that count positions
    from behind the padding token keep their own; their scores do not depend on it.
    """
    counted = any(
        isinstance(part, nn.Embedding)
        and part.padding_idx is not None
        and "position" in name
        for name, part in model.named_modules()
    )
    if tokenizer.pad_token_id is None or counted:
        return
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = tokenizer.pad_token_id
