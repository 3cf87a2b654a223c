"""Re-ranking beside sentence-transformers, on the same records: a training step, and scoring.

    python benchmarks/reranker_against_sentence_transformers.py MODEL RECORDS

MODEL is an encoder's folder or name, which gets a new head of one label; --shapes modernbert-base
builds that architecture with random weights and MODEL's words in its place. RECORDS is a JSONL of
the schema of microsoft/ms_marco.

Training: whole trainers, loaders and optimizers included, from the start of one step to the start
of the next, in bf16 autocast. Theirs is CrossEncoderTrainer with LambdaLoss, as it comes (as many
pairs at a time as the batch has queries) or with all pairs in one pass (mini_batch_size=-1); ours
is RerankerModule under Lightning with the length-biased loss, with one multiplier per (query,
negative) or without a constraint.

Scoring: from texts to scores, tokenisation included. Theirs is CrossEncoder.predict on all pairs,
in float32 as it comes, or under bf16 autocast; ours is Trainer.predict in the same precision. The
first of two runs is not timed. --fast gives sentence-transformers flash attention where it is
installed, with which it computes no padding.

A sample is a pair of query and passage; ratios are to the first of each table. The floor is the
time of the matrix products of the pairs' tokens, padding not counted, three times in training.
Rounds and memory: rounds.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rounds import (
    CUDA,
    DEVICE,
    Clock,
    Memory,
    add_common,
    lightning_trainer,
    product_rate,
    read_rows,
    run,
    spread,
)

TRAINING = ("st-lambda", "st-lambda-one-pass", "ours-pointwise", "ours-none")
SCORING = ("st-predict", "ours-predict")
SCORING_BF16 = ("st-predict-bf16", "ours-predict-bf16")
UNTIMED = 2  # steps before those that are timed

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help="a folder, a name on the hub, or package:NAME/FOLDER"
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=8, help="timed, after two that are not"
    )
    parser.add_argument("--queries", type=int, default=4, help="a step")
    parser.add_argument("--scored", type=int, default=100, help="queries scored")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", choices=("modernbert-base",))
    parser.add_argument("--contestants", nargs="+")
    add_common(parser)
    parser.set_defaults(random=None)  # shapes of language models
    run(parser.parse_args(), (TRAINING, SCORING, SCORING_BF16), measure, "pair")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds a pair by the clock and of CPU time, the floor, and memory."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    training = name in TRAINING
    count = (
        arguments.queries * (arguments.steps + UNTIMED)
        if training
        else arguments.scored
    )
    rows = spread(read_rows(arguments.records), count)
    ours = name.startswith("ours")
    if training:
        contestant = run_ours if ours else run_trainer
    else:
        contestant = run_ours_predict if ours else run_predict
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        source = model_folder(arguments, Path(folder))
        memory, scores = contestant(name, arguments, rows, source, Path(folder), clock)
        taken = clock.median_of_last(arguments.steps if training else 1)
        floor, flops, tokens = floor_of_a_pair(name, source, rows, arguments.max_length)
    pairs = pairs_in(rows) * (arguments.queries / len(rows) if training else 1)
    return {
        **{key: value / pairs for key, value in taken.items()},
        "floor_seconds": floor,
        "samples": 1,
        "tokens": tokens,
        "flops": flops,
        **memory.peak(),
        **(
            {"mean_score": mean(scores), "mean_square": mean(s * s for s in scores)}
            if scores
            else {}
        ),
    }


def model_folder(arguments: argparse.Namespace, folder: Path) -> str:
    """The model, or the shapes asked for with random weights and the model's words."""
    from transformers import (
        AutoTokenizer,
        ModernBertConfig,
        ModernBertForSequenceClassification,
    )

    from pl_pointwise.tasks.common.models import model_source

    source = model_source(arguments.model)
    if arguments.shapes is None:
        return source
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = ModernBertConfig(
        num_labels=1, pad_token_id=tokenizer.pad_token_id, classifier_pooling="mean"
    )
    ModernBertForSequenceClassification(config).save_pretrained(folder / "model")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def texts(rows: list[Row]) -> list[tuple[str, str]]:
    return [
        (row["query"], text) for row in rows for text in row["passages"]["passage_text"]
    ]


def pairs_in(rows: list[Row]) -> int:
    return len(texts(rows))


def floor_of_a_pair(
    name: str, source: str, rows: list[Row], max_length: int
) -> tuple[float, float, float]:
    """The least time for a pair, its FLOP, and its tokens: means over the pairs.

    The time is that of the products of weights and of attention at the measured rate.

    Windows of attention are not subtracted: the passages are hardly longer.
    """
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    config = AutoConfig.from_pretrained(source, num_labels=1)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    layers = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(layer.weight.numel() for layer in layers)
    attention = 4 * config.num_hidden_layers * config.hidden_size
    queries, passages = map(list, zip(*texts(rows), strict=True))
    ids = AutoTokenizer.from_pretrained(source)(
        queries, passages, truncation="longest_first", max_length=max_length
    )["input_ids"]
    flops = sum(
        2 * weights * len(pair) + attention * len(pair) ** 2 for pair in ids
    ) / len(ids)
    flops *= 3 if name in TRAINING else 1
    rate = product_rate(config, torch.float32 if name in SCORING else torch.bfloat16)
    return flops / rate, flops, sum(map(len, ids)) / len(ids)


def cross_encoder(source: str, arguments: argparse.Namespace) -> Any:
    from sentence_transformers.cross_encoder import CrossEncoder

    flash = arguments.fast and find_spec("flash_attn") is not None
    return CrossEncoder(
        source,
        num_labels=1,
        max_length=arguments.max_length,
        model_kwargs={"attn_implementation": "flash_attention_2"} if flash else None,
    )


def run_trainer(
    name: str,
    arguments: argparse.Namespace,
    rows: list[Row],
    source: str,
    out: Path,
    clock: Clock,
) -> tuple[Memory, list[float]]:
    """CrossEncoderTrainer with LambdaLoss, the selected passage relevant."""
    from datasets import Dataset
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import LambdaLoss
    from transformers import TrainerCallback

    class Marks(TrainerCallback):
        on_step_begin = on_train_end = clock.mark

    memory = Memory()
    model = cross_encoder(source, arguments)
    CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(
            output_dir=str(out),
            per_device_train_batch_size=arguments.queries,
            max_steps=arguments.steps + UNTIMED,
            bf16=True,
            use_cpu=not CUDA,
            learning_rate=2e-5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=CUDA,
        ),
        train_dataset=Dataset.from_dict(
            {
                "query": [row["query"] for row in rows],
                "docs": [row["passages"]["passage_text"] for row in rows],
                "labels": [row["passages"]["is_selected"] for row in rows],
            }
        ),
        loss=LambdaLoss(
            model, mini_batch_size=-1 if name.endswith("one-pass") else None
        ),
        callbacks=[Marks()],
    ).train()
    return memory, []


def written(rows: list[Row], folder: Path) -> str:
    path = folder / "records.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def run_ours(
    name: str,
    arguments: argparse.Namespace,
    rows: list[Row],
    source: str,
    out: Path,
    clock: Clock,
) -> tuple[Memory, list[float]]:
    """RerankerModule under Lightning."""
    from pl_pointwise import Pointwise
    from pl_pointwise.tasks import RerankerDataModule, RerankerModule

    memory = Memory()
    module = RerankerModule(
        source,
        formulation=Pointwise(alpha=1.0, dual_lr=0.1)
        if name == "ours-pointwise"
        else None,
        tolerance=3.0,
        max_length=arguments.max_length,
    )
    data = RerankerDataModule(
        source="files",
        train_file=written(rows, out),
        val_fraction=0.0,
        max_queries=None,
        batch_size=arguments.queries,
    )
    lightning_trainer(out, clock, max_epochs=1).fit(module, data)
    return memory, []


def run_predict(
    name: str,
    arguments: argparse.Namespace,
    rows: list[Row],
    source: str,
    out: Path,
    clock: Clock,
) -> tuple[Memory, list[float]]:
    """CrossEncoder.predict on all pairs at once: it sorts them by length."""
    import sentence_transformers.cross_encoder  # noqa: F401 — before the memory is read

    memory = Memory()
    model = cross_encoder(source, arguments)
    pairs = texts(rows)
    low = name in SCORING_BF16
    clock.mark()
    for _ in range(2):
        with torch.autocast(DEVICE, torch.bfloat16) if low else nullcontext():
            scores = model.predict(
                pairs, show_progress_bar=False, activation_fn=torch.nn.Identity()
            )
        clock.mark()
    return memory, [float(score) for score in scores]


def run_ours_predict(
    name: str,
    arguments: argparse.Namespace,
    rows: list[Row],
    source: str,
    out: Path,
    clock: Clock,
) -> tuple[Memory, list[float]]:
    """Trainer.predict, from the file with the texts; reading it and the tokenizer included."""
    from pl_pointwise.tasks import RerankerDataModule, RerankerModule

    memory = Memory()
    module = RerankerModule(source, max_length=arguments.max_length)
    trainer = lightning_trainer(
        out, precision="bf16-mixed" if name in SCORING_BF16 else "32-true"
    )
    candidates = [
        {"query": row["query"], "passages": row["passages"]["passage_text"]}
        for row in rows
    ]
    path = written(candidates, out)
    clock.mark()
    for _ in range(2):
        data = RerankerDataModule(source="files", predict_file=path, eval_batch_size=32)
        found = trainer.predict(module, data)
        clock.mark()
    return memory, [
        score for batch in found for query in batch for score in query["scores"]
    ]


if __name__ == "__main__":
    main()
