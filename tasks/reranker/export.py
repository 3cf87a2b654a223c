"""What of an export is for `sentence_transformers.CrossEncoder`: tokenizer, configuration and head.

`CrossEncoder(path).predict` and `.rank` then give the module's scores in float32, also of cut
pairs. Three things of the module are not what CrossEncoder would assume, so the folder says them:

- the score is the logit itself, where a one-label head would get a sigmoid: activation Identity;
- a two-label head scores with logit 1 − logit 0, where `rank` wants one label: the head is folded
  into (W₁ − W₀, b₁ − b₀);
- an input template is a string, where CrossEncoder would feed a pair: it becomes the tokenizer's
  chat template, with the roles query and document (read from sentence-transformers 6 on).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .template import Template

USAGE = """
from sentence_transformers import CrossEncoder

model = CrossEncoder("PATH OR NAME OF THIS REPOSITORY")
model.rank("how long is the river", ["It is 6,650 km long.", "It rises in the hills."])
"""

CONFIG = {"activation_fn": "torch.nn.modules.linear.Identity"}
ROLES = ("query", "document")  # CrossEncoder's, in a chat template
PROBES = (
    ("how long is the river", "The river is 6,650 km long, from source to mouth."),
    ("a", " leading space, {braces}, 'quotes' and \"more\"\nof them\n"),
)


def exported_tokenizer(
    tokenizer: PreTrainedTokenizerBase, max_length: int, template: Template | None
) -> PreTrainedTokenizerBase:
    """The tokenizer, so that it makes the module's inputs: of pairs, or by ``template``."""
    # CrossEncoder would render pairs with whatever chat template it finds.
    tokenizer.chat_template = None
    # Only where the module read one text; pairs need no template.
    if template is not None:
        set_chat_template(tokenizer, template)
    tokenizer.model_max_length = max_length
    return tokenizer


def save_with_one_label(model: PreTrainedModel, folder: Path) -> None:
    """Saves the model; of a two-label head, its one layer of two outputs, W₁ − W₀ and b₁ − b₀."""
    state = model.state_dict()
    # The difference of two rows is a head of one label with the same score.
    if model.config.num_labels == 2:
        linear = {
            name: part
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear)
        }
        (head,) = (name for name, part in linear.items() if part.out_features == 2)
        for key in [name for name in state if name.startswith(f"{head}.")]:
            state[key] = state[key][1:] - state[key][:1]
    model.save_pretrained(folder, state_dict=state)
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.save_pretrained(folder)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: Template) -> None:
    """Gives it the Jinja template that renders a (query, document) conversation as `template` does.

    Chat templates are tokenised without special tokens, so those of a single text are written out.

    Raises:
        ValueError: this tokenizer makes other tokens of it than the module was trained with.
    """
    encoding = tokenizer("a", return_special_tokens_mask=True)
    special, tokens = encoding["special_tokens_mask"], encoding.tokens()
    start = special.index(0)
    before = "".join(tokens[:start]) + template.before
    after = template.after + "".join(tokens[start + special.count(0) :])
    # JSON's escapes are among those that Jinja reads.
    parts = before, template.between, after
    first, second, third = (json.dumps(part, ensure_ascii=False) for part in parts)
    contents = (
        f'(messages | selectattr("role", "eq", "{role}") | first).content'
        for role in ROLES
    )
    # A content may be a list of parts: CrossEncoder decides from how the template looks.
    query, document = (
        f"({text} if {text} is string else {text}[0].text)" for text in contents
    )
    tokenizer.chat_template = (
        f"{{{{ {first} + {query} + {second} + {document} + {third} }}}}"
    )
    for query, passage in PROBES:
        pair = zip(ROLES, (query, passage), strict=True)
        messages = [{"role": role, "content": text} for role, text in pair]
        rendered: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True
        )
        expected = tokenizer(template.render(query, passage).text).input_ids
        # Llama's legacy tokenizers put a blank behind a special token that is written out.
        if rendered["input_ids"] != expected:
            raise ValueError(
                f"The template {template} cannot be exported: this tokenizer reads a text "
                "differently after a special token that is written out. Train on pairs to export."
            )
