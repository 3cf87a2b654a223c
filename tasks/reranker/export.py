"""Export a trained re-ranker as a folder that loads with `sentence_transformers.CrossEncoder`.

`CrossEncoder(path).predict` and `.rank` then give the module's scores in float32, also of cut
pairs. Two things of the module are not what CrossEncoder would assume, so the folder says them:

- the score is the logit itself, where CrossEncoder would take a sigmoid: activation Identity;
- an input template is a string, where CrossEncoder would feed a pair: it becomes the tokenizer's
  chat template, with the roles query and document (read from sentence-transformers 6 on).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pl_pointwise.files import replaced_folder
from pl_pointwise.model_card import write_card
from pl_pointwise.module import PointwiseModule
from pl_pointwise.tasks.common.models import check_weights, model_source

from .encoding import split_template

USAGE = """
from sentence_transformers import CrossEncoder

model = CrossEncoder("PATH OR NAME OF THIS REPOSITORY")
model.rank("how long is the river", ["It is 6,650 km long.", "It rises in the hills."])
"""

ROLES = ("query", "document")  # CrossEncoder's, in a chat template
PROBES = (
    ("how long is the river", "The river is 6,650 km long, from source to mouth."),
    ("a", " leading space, {braces}, 'quotes' and \"more\"\nof them\n"),
)


def export_cross_encoder(
    module: PointwiseModule,
    model: PreTrainedModel,
    name: str,
    max_length: int,
    template: str | None,
    path: Path,
) -> Path:
    """Save the model, its tokenizer, input format and model card as a CrossEncoder folder.

    Args:
        name: the name or folder that the model and its tokenizer came from.
        max_length: the most tokens of an input.
        template: what the module reads as one text; None: pairs.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_source(name), trust_remote_code=False)
    # CrossEncoder would render pairs with whatever chat template it finds.
    tokenizer.chat_template = None
    if template is not None:
        set_chat_template(tokenizer, template)
    tokenizer.model_max_length = max_length

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.problem_type = None
    config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}

    card = {"library_name": "sentence-transformers", "pipeline_tag": "text-ranking"}
    with replaced_folder(path) as folder:
        model.save_pretrained(folder)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        check_weights(AutoModelForSequenceClassification, folder)
        write_card(module, folder, **card, base_model=name, usage=USAGE)
    return path


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Gives it the Jinja template that renders a (query, document) conversation as `template` does.

    Chat templates are tokenised without special tokens, so those of a single text are written out.

    Raises:
        ValueError: this tokenizer makes other tokens of it than the module was trained with.
    """
    encoding = tokenizer("a", return_special_tokens_mask=True)
    special, tokens = encoding["special_tokens_mask"], encoding.tokens()
    start = special.index(0)
    before, between = split_template(template)
    before = "".join(tokens[:start]) + before
    after = "".join(tokens[start + special.count(0) :])
    # JSON's escapes are among those that Jinja reads.
    parts = before, between, after
    first, second, third = (json.dumps(part, ensure_ascii=False) for part in parts)
    said = (f'(messages | selectattr("role", "eq", "{role}") | first).content' for role in ROLES)
    # A content may be a list of parts: CrossEncoder decides from how the template looks.
    query, document = (f"({text} if {text} is string else {text}[0].text)" for text in said)
    tokenizer.chat_template = f"{{{{ {first} + {query} + {second} + {document} + {third} }}}}"
    for query, passage in PROBES:
        pair = zip(ROLES, (query, passage), strict=True)
        messages = [{"role": role, "content": text} for role, text in pair]
        rendered: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        expected = tokenizer(template.format(query=query, passage=passage)).input_ids
        if rendered["input_ids"] != expected:
            raise ValueError(
                f"The template {template!r} cannot be exported: this tokenizer reads a text "
                "differently after a special token that is written out. Train on pairs to export."
            )
