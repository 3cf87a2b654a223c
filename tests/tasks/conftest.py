"""A tiny tokenizer and tiny causal language models, built on the spot."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from pl_pointwise import Training
from pl_pointwise.cli import main
from pl_pointwise.command_line.configs import packaged_comparisons, packaged_configs
from pl_pointwise.compare import command
from pl_pointwise.data import units_of
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.loading import Policy
from pl_pointwise.tasks.language_model.roles import collate_rows
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.pl_pointwise.toy import trainer

CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}{{ '<|end|>\\n' }}{%- endif %}
{%- for message in messages %}{{ '<|start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' }}
{{- (call.function or call) | tojson }}{{ '</tool_call>' }}{%- endfor %}
{{- '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{%- endif %}"""

ADAPTERS = Lora(
    r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "o_proj"]
)
VOCABULARY = 97  # of models that need no tokenizer; divides nothing


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, so any text has a known length; a chat template with tools and calls."""
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """A configuration of three narrow layers and no dropout; windows are shorter than prompts."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    window = {"head_dim": 16, "sliding_window": 6, "final_logit_softcapping": 3.0}
    alternating = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma3 = {"layer_types": alternating, "query_pre_attn_scalar": 20}
    kinds: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
        "llama": (LlamaConfig, {}),
        "qwen2": (Qwen2Config, {}),
        "mistral": (MistralConfig, {"sliding_window": 7}),
        "phi3": (Phi3Config, {"sliding_window": 7}),
        "gemma2": (Gemma2Config, window),
        "gemma3": (Gemma3TextConfig, window | gemma3),
        "granite": (GraniteConfig, {"logits_scaling": 0.3}),
        "cohere": (CohereConfig, {"logit_scale": 2.5}),
        # without what the shared prompt needs: ALiBi, and convolution between tokens
        "bloom": (BloomConfig, {"n_layer": 2, "n_head": 4}),
        "lfm2": (Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"]}),
    }
    kind, own = (
        kinds[architecture]
        if architecture in kinds
        else (CONFIG_MAPPING[architecture], {})
    )
    if kind is BloomConfig:
        sizes = {name: sizes[name] for name in ("vocab_size", "hidden_size")}
    return kind(**sizes | own | overrides)


def build_model(
    architecture: str, attention: str | None = None, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Random weights large enough for attention and likelihoods to be far from uniform."""
    torch.manual_seed(seed)
    config = build_config(architecture, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15)
    return model


def save_llama(
    folder: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    more: Sequence[str] = (),
) -> Path:
    """Save a tiny Llama and its tokenizer, which knows these tokens more, into a folder."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list(more))
    build_model("llama", seed=seed, vocab_size=len(tokenizer)).to(
        dtype
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapt(model: PreTrainedModel, seed: int = 1, **options: Any) -> PeftModel:
    """LoRA on every linear layer, away from its zero start, so that policy and reference differ."""
    torch.manual_seed(seed)
    options = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8} | options
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return adapted


def overlays(task: str) -> list[str]:
    """The names of a task's packaged configurations over its base."""
    return [name for name in packaged_configs() if name.startswith(f"{task}/")]


def trained(task: str) -> list[Any]:
    """Base and overlays of a language task as parameters.

    A shared method's file is trained by the re-ranker; here some are of the slow set.
    """
    slow = (
        "penalty penalty_hinge penalty_squared_hinge tilted cvar relaxed_linear".split()
    )
    # Of parts that are trained one by one.
    slow += [
        "paper_pointwise",
        "paper_relaxed",
        "simpo_floor",
        "cpo_floor",
        "cal_dpo_floor",
    ]
    names = [(name, name.partition("/")[2] in slow) for name in (task, *overlays(task))]
    return [pytest.param(n, marks=pytest.mark.slow) if late else n for n, late in names]


def comparisons(*tasks: str) -> list[Any]:
    """The packaged comparisons of tasks as parameters; the longest, of methods that are fitted one
    by one too, are of the slow set.
    """
    slow = ("table", "practical", "required")
    return [
        pytest.param(n, marks=pytest.mark.slow) if n.rpartition("/")[2] in slow else n
        for n in packaged_comparisons()
        if n.partition("/")[0] in tasks
    ]


_SILENT = (
    "logger",
    "enable_progress_bar",
    "enable_checkpointing",
    "enable_model_summary",
)
QUIET_RUN = {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}
QUIET_RUN |= {f"trainer.{name}": "false" for name in _SILENT}
"""Options of a short run on the command line."""


def words(options: dict[str, str]) -> list[str]:
    """Options as the command line takes them."""
    return [word for key, value in options.items() for word in (f"--{key}", value)]


def comparison(name: str, arguments: list[str], output: Path) -> list[dict[str, str]]:
    """The rows of a packaged comparison's table, one for each of its methods, none failed."""
    where = ["--methods", name, "--output", str(output)]
    sanity = ["--trainer.num_sanity_val_steps", "0"]  # `fit` has them.
    main(["compare", "--config", name.partition("/")[0], *where, *arguments, *sanity])
    with (output / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    methods = yaml.safe_load(packaged_comparisons()[name].read_text())
    assert [row["method"] for row in rows] == list(methods)
    assert {row["error"] for row in rows} == {""}
    return rows


def train(task: str, name: str, arguments: list[str], root: Path) -> None:
    """A fit of a packaged configuration, a base or one over it."""
    overlay = [] if name == task else ["--config", name]
    main(
        [
            "fit",
            "--config",
            task,
            *overlay,
            *arguments,
            "--trainer.default_root_dir",
            str(root),
        ]
    )


def fitted_checkpoint(
    task: str,
    arguments: list[str],
    root: Path,
    multipliers: tuple[str, tuple[int, int]],
) -> tuple[list[str], Path]:
    """The command line and the checkpoint of a fit of TASK/pointwise.

    multipliers: the constraint whose multipliers have to have moved, and their shape.
    """
    base = ["--config", task, "--config", f"{task}/pointwise", *arguments]
    base[base.index("--trainer.enable_checkpointing") + 1] = "true"
    base += ["--trainer.default_root_dir", str(root), "--trainer.max_epochs", "1"]
    main(["fit", *base])
    (checkpoint,) = root.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["pl_pointwise"]
    found = state["multipliers"][multipliers[0]]
    assert found.shape == multipliers[1]
    assert found.max() > 0
    return base, checkpoint


def predictions(base: list[str], asked: Any, checkpoint: Path, *more: str) -> list[Any]:
    """What `predict` writes of the records of a file, by a model of a checkpoint."""
    found = checkpoint.with_suffix(".jsonl")
    options = {"data.init_args.predict_file": str(asked), "ckpt_path": str(checkpoint)}
    writer = {
        "trainer.callbacks+": "PredictionWriter",
        "trainer.callbacks.path": str(found),
    }
    main(["predict", *base, *words(options | writer), *more])
    return read_rows(found)


@pytest.fixture
def runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a packaged comparison the runs and tables: what else it does has tests of its own.

    The check beforehand builds every method once more, and plots take a fifth of the time.
    """
    monkeypatch.setattr(command, "check_methods", lambda *_: None)
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)


def _taken(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a dataclass, which are removed."""
    return {f.name: options.pop(f.name) for f in fields(kind) if f.name in options}


def make_module(
    kind: Any, folder: Path, training: Training, moved: bool, **options: Any
) -> Any:
    """A language task's module; options of policy and training are told apart by their names.

    moved: whether its adapters are away from their zero start.
    """
    policy = Policy(str(folder), **_taken(Policy, options))
    training = replace(training, **_taken(Training, options))
    module = kind(policy, training=training, **options)
    if moved:
        move_adapters(module)
    return module


def make_data(
    kind: Any,
    folder: Path | None,
    files: dict[str, Any],
    stage: str = "",
    **options: Any,
) -> Any:
    """A language task's data module over files, set up for a stage if one is given.

    Options of Preparation are told apart.
    """
    preparation = Preparation(**_taken(Preparation, options))
    name = None if folder is None else str(folder)
    data = kind(name, source="files", preparation=preparation, **files, **options)
    if stage:
        data.setup(stage)
    return data


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON line a row; a text is written as it is."""
    lines = [
        row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
        for row in rows
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def written_files(folder: Path, files: dict[str, Any]) -> dict[str, Any]:
    """Options of a data module; rows given for a file are written to one of the option's name."""
    return {
        name: str(write_rows(folder / f"{name}.jsonl", given))
        if isinstance(given, list)
        else given
        for name, given in files.items()
    }


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def quiet_trainer(root: Path, **options: Any) -> Trainer:
    """A trainer on the CPU that says and keeps nothing."""
    return trainer(default_root_dir=root, **{"num_sanity_val_steps": 2, **options})


def before_and_after(
    module: Any, data: Any, root: Path, **options: Any
) -> tuple[dict[str, float], dict[str, float]]:
    """What a test finds before and after a fit with these options of its trainer."""
    run, found = quiet_trainer(root, **options), []
    for fits in (False, True):
        if fits:
            run.fit(module, data)
        parts = run.test(module, data, verbose=False)
        found.append({key: value for part in parts for key, value in part.items()})
    return found[0], found[1]


def move_adapters(module: torch.nn.Module, seed: int = 3) -> None:
    """Puts trained weights away from their start, so that policy and reference differ."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.requires_grad:
                weight.normal_(0, 0.2)


def random_batch(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[Sequence[int]],
    seed: int = 0,
    records: Sequence[Record] = (),
    roles: Sequence[str] = ("prefer", "avoid"),
) -> dict[str, Any]:
    """A batch of random tokens of these lengths; see language_model/roles.py.

    records: what each row is of; by default one preferred response and others to avoid.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 90, (length,), generator=generator).tolist()

    prompts = [ids(length) for length in prompt_lengths]
    responses = [[ids(length) for length in lengths] for lengths in response_lengths]
    if not records:
        kinds = [["prefer", *["avoid"] * (len(of) - 1)] for of in responses]
        records = [
            Record([], [], tuple(Response(role, "") for role in of), "") for of in kinds
        ]
    widths = {
        role: max(record.roles.count(role) for record in records) for role in roles
    }
    rows = [
        {
            "index": row,
            "prompt": np.array(prompts[row]),
            "responses": [np.array(ids) for ids in responses[row]],
            "columns": max(map(len, responses)),
            "record": record,
            "widths": widths,
            "rank": row,
        }
        for row, record in enumerate(records)
    ]
    return collate_rows(rows, roles)


BY_HAND = ("s", "mean", "ref", "kl", "lead")


def response_by_hand(
    module: Any, batch: dict[str, Any], row: int, column: int
) -> dict[str, float]:
    """s, s̄, s_ref, mean KL and least lead of a response, by the model alone, from its logits."""
    prompt = batch["prompt_ids"][row, : batch["prompt_lengths"][row]]
    response = batch["response_ids"][
        row, column, : batch["response_lengths"][row, column]
    ]
    ids = torch.cat([prompt, response])[None]
    with torch.no_grad():
        policy = (
            module.model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        )
        with module.model.disable_adapter():
            other = (
                module.model(ids)
                .logits[0, len(prompt) - 1 : -1]
                .double()
                .log_softmax(-1)
            )
    own, reference = (p.gather(1, response[:, None])[:, 0] for p in (policy, other))
    s, kl = own.sum().item(), (policy.exp() * (policy - other)).sum(-1).mean().item()
    next_best = policy.scatter(1, response[:, None], -torch.inf).max(-1).values
    lead = (own - next_best).min().item()
    return dict(
        zip(
            BY_HAND,
            (s, s / len(response), reference.sum().item(), kl, lead),
            strict=True,
        )
    )


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, an end token, a chat template that renders tools and tool calls."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def language_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its tokenizer, as ``from_pretrained`` reads it."""
    return save_llama(tmp_path_factory.mktemp("language_model"))


def shared_units(data: Any) -> dict[tuple[str, str], int]:
    """How many units each two splits of a data module have in common."""
    units = {
        name: set(found)
        for name in ("train", "val", "test")
        if name in data.datasets
        and (found := units_of(data.datasets[name])) is not None
    }
    return {
        (first, second): len(units[first] & units[second])
        for first, second in combinations(units, 2)
        if data.datasets[first] is not data.datasets[second]
    }
