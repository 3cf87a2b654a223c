"""Export a trained re-ranker as a folder that loads with `sentence_transformers.CrossEncoder`.

`CrossEncoder(path).predict` and `.rank` then give the module's scores in float32, also of cut
pairs. Two things of the module are not what CrossEncoder would assume, so the folder says them:

- the score is the logit itself, where a one-label head would get a sigmoid: activation Identity;
- a two-label head scores with logit 1 − logit 0, where `rank` wants one label: the head is folded
  into (W₁ − W₀, b₁ − b₀).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from pl_pointwise.model_card import write_card
from pl_pointwise.tasks.common.models import model_source

if TYPE_CHECKING:
    from .module import RerankerModule

USAGE = """
from sentence_transformers import CrossEncoder

model = CrossEncoder("PATH OR NAME OF THIS REPOSITORY")
model.rank("how long is the river", ["It is 6,650 km long.", "It rises in the hills."])
"""


def export_cross_encoder(module: RerankerModule, path: str | Path) -> Path:
    """Save the module's model, tokenizer and model card as a CrossEncoder folder.

    path: folder to write; files of an earlier export in it are replaced. Returned.

    Raises:
        ValueError: a two-label head that cannot be folded.
    """
    path = Path(path)
    source = model_source(module.model_name)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    # CrossEncoder would render pairs with whatever chat template it finds.
    tokenizer.chat_template = None
    tokenizer.model_max_length = module.max_length

    state = {key: value.detach().cpu() for key, value in module.model.state_dict().items()}
    config = copy.deepcopy(module.model.config)
    if config.num_labels == 2:
        state.update(folded_head(module.model))
        config.num_labels = 1
    config.architectures = [type(module.model).__name__]
    config.problem_type = None
    config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}

    path.mkdir(parents=True, exist_ok=True)
    module.model.save_pretrained(path, state_dict=state)
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    write_card(
        module,
        path,
        library_name="sentence-transformers",
        pipeline_tag="text-ranking",
        base_model=module.model_name,
        usage=USAGE,
    )
    return path


def folded_head(model: PreTrainedModel) -> dict[str, Tensor]:
    """The head, the one linear layer with two outputs, of one label: W₁ − W₀ and b₁ − b₀."""
    heads = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == 2
    ]
    if len(heads) != 1:
        raise ValueError(f"{type(model).__name__} has {len(heads)} heads of two labels to fold.")
    name, layer = heads[0]
    folded = {f"{name}.weight": layer.weight[1:] - layer.weight[:1]}
    if layer.bias is not None:
        folded[f"{name}.bias"] = layer.bias[1:] - layer.bias[:1]
    return {key: value.detach().cpu() for key, value in folded.items()}
