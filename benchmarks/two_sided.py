"""Forget forty records, no less and no more, and keep the others: requirements on both sides.

    python benchmarks/two_sided.py --models MODELS --data DATA --output two_sided.csv
    python benchmarks/two_sided.py … --seeds 0 1 --methods "Pointwise()" "hinge 1"

A small language model is taught 200 made-up answers, then has to forget 40 of them: each answer's
log-probability a token within .25 of that of a target model, which learned the kept ones alone;
each kept one not .1 below what it was; the objective is the KL to what the model was, on the kept.
The training samples are the requirement: there are no others to carry over to. Only the upper two
layers are trained, here and when the answers are taught, so what is below runs once a seed.

The settings of a rival are tried on the seed 100; the one with the fewest samples outside or lost
(ties: the least KL) is judged on the others. A row of the CSV is a run, a run that has one is not
repeated. MODELS holds minimind2-small-26m, DATA forget.jsonl and keep.jsonl of
locuslab/tofu: {"prompt", "answer"} a line.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, softplus
from transformers import AutoModelForCausalLM, AutoTokenizer

from pl_pointwise import (
    Average,
    Constraint,
    Formulation,
    Optimization,
    Penalty,
    Pointwise,
    PointwiseDataModule,
    PointwiseModule,
    Relaxed,
    Training,
)

MODEL = "minimind2-small-26m"
TUNING_SEED = 100
BAND, LOSS, GRACE = 0.25, 0.1, 0.05
"""Nats a token: how far a forgotten answer may be from the target, how much a kept one may lose,
and by how much more it counts as missed in the columns that leave narrow misses out."""
TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
NPO_BETA = 0.1


@dataclass(frozen=True)
class Scale:
    """How large the study is."""

    forget: int = 40
    keep: int = 160
    tokens: int = 12  # Of an answer; the rest is cut off.
    layers: int = 2  # That are trained.
    batch: int = 20
    teaching_epochs: int = 12
    teaching_rate: float = 1e-3
    epochs: int = 15
    rate: float = 3e-4


# The model --------------------------------------------------------------------------------------


class Upper(nn.Module):
    """The upper layers of a Llama, for the tokens that predict one of an answer.

    Prompts are read by the model as it was: at each layer a prompt's tokens come in as they did
    then, so that only the answers' have to be computed. Tokens of all samples stand one after
    another, without padding.
    """

    def __init__(self, model: Any, layers: int) -> None:
        super().__init__()
        self.layers = model.model.layers[-layers:]
        self.norm, self.head = model.model.norm, model.lm_head
        self.rotary = model.model.rotary_emb
        self.requires_grad_(False)
        self.layers.requires_grad_(True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Log-probabilities of the vocabulary for every token of the answers, (A, V)."""
        hidden, answers = batch["hidden"], batch["answers"]  # (N, layers, d), (A,)
        cosine, sine = (
            turn[0, :, None] for turn in self.rotary(hidden, batch["position"][None])
        )
        x = hidden[answers, 0]
        for number, layer in enumerate(self.layers):
            tokens = hidden[:, number].index_copy(0, answers, x)
            x = self._layer(layer, tokens, batch, answers, (cosine, sine))
        logits: Tensor = self.head(self.norm(x))
        return logits.log_softmax(-1)

    @staticmethod
    def _layer(
        layer: Any,
        x: Tensor,
        batch: dict[str, Tensor],
        rows: Tensor,
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        """What the layer makes of the tokens ``rows``, which see those of their sample so far."""
        attention, (cosine, sine) = layer.self_attn, turn
        sample, position = batch["sample"], batch["position"]
        grid = int(sample[-1]) + 1, int(position.max()) + 1

        def heads(values: Tensor) -> Tensor:
            return values.unflatten(-1, (-1, attention.head_dim))

        def turned(values: Tensor, rows: Tensor) -> Tensor:
            first, second = values.chunk(2, -1)
            return values * cosine[rows] + torch.cat([-second, first], -1) * sine[rows]

        def padded(values: Tensor, rows: Tensor) -> Tensor:  # (B, heads, T, size)
            found = values.new_zeros(*grid, *values.shape[1:])
            return found.index_put((sample[rows], position[rows]), values).transpose(
                1, 2
            )

        normed, everything = layer.input_layernorm(x), torch.arange(len(x))
        seen = scaled_dot_product_attention(
            padded(turned(heads(attention.q_proj(normed[rows])), rows), rows),
            padded(turned(heads(attention.k_proj(normed)), everything), everything),
            padded(heads(attention.v_proj(normed)), everything),
            is_causal=True,
            enable_gqa=True,
        )
        seen = seen.transpose(1, 2)[sample[rows], position[rows]].flatten(1)
        x = x[rows] + attention.o_proj(seen)
        return x + layer.mlp(layer.post_attention_layernorm(x))


# Records ----------------------------------------------------------------------------------------


class Records(list[dict[str, Any]]):
    """Samples of which every batch has its share of those to forget."""

    @property
    def strata(self) -> list[int]:
        return [int(row["forget"]) for row in self]


class Samples(PointwiseDataModule):
    def __init__(self, records: Records, batch: int, seed: int) -> None:
        super().__init__(batch_size=batch, seed=seed)
        self.datasets = {"train": records}

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        index = torch.tensor([row["index"] for row in rows])
        forget = torch.tensor([row["forget"] for row in rows])
        return {"index": index, "forget": forget, "records": rows}


def joined(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Tokens one after another; ``answers`` are those that predict a token of ``ids``."""
    sizes = torch.tensor([len(row["hidden"]) for row in rows])
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    position = torch.cat([torch.arange(size) for size in sizes])
    sample = torch.arange(len(rows)).repeat_interleave(sizes)
    batch = {
        "hidden": torch.cat([row["hidden"] for row in rows]),
        "sample": sample,
        "position": position,
        "answers": (position >= (sizes - lengths)[sample]).nonzero()[:, 0],
        "ids": torch.cat([row["ids"] for row in rows]),
        "lengths": lengths,
        "of": torch.arange(len(rows)).repeat_interleave(lengths),
    }
    if "taught" in rows[0]:
        batch["policy"] = torch.cat([row["policy"] for row in rows])
        batch |= {
            name: torch.stack([row[name] for row in rows])
            for name in ("taught", "target")
        }
    return batch


def means(tokens: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """(B,), each answer's mean over its tokens."""
    sums = tokens.new_zeros(len(batch["lengths"])).index_add(0, batch["of"], tokens)
    return sums / batch["lengths"]


def likelihoods(policy: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """(B,), each answer's log-probability a token."""
    return means(policy.gather(1, batch["ids"][:, None])[:, 0], batch)


def divergences(policy: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """(B,), KL(taught ‖ now) a token."""
    taught = batch["policy"]
    return means((taught.exp() * (taught - policy)).sum(-1), batch)


def draw(data: Path, model: Any, tokenizer: Any, seed: int, scale: Scale) -> Records:
    """The records of a seed, with what the lower layers make of their tokens."""
    generator = torch.Generator().manual_seed(seed)
    records = Records()
    for name, count in (("forget", scale.forget), ("keep", scale.keep)):
        lines = [
            json.loads(line)
            for line in (data / f"{name}.jsonl").read_text().splitlines()
        ]
        for i in torch.randperm(len(lines), generator=generator)[:count].tolist():
            prompt = TEMPLATE.format(prompt=lines[i]["prompt"])
            asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            answer = tokenizer(lines[i]["answer"], add_special_tokens=False)[
                "input_ids"
            ]
            answer = answer[: scale.tokens]
            with torch.no_grad():
                tokens = torch.tensor([asked + answer[:-1]])
                states = model.model(tokens, output_hidden_states=True).hidden_states
            hidden = torch.stack(states[-scale.layers - 1 : -1], dim=2)[0]
            records.append(
                {
                    "hidden": hidden,
                    "ids": torch.tensor(answer),
                    "forget": name == "forget",
                }
            )
    return records


def teach(upper: Upper, records: Records, seed: int, scale: Scale) -> None:
    """Trains until the answers are known."""
    parameters = [
        parameter for parameter in upper.parameters() if parameter.requires_grad
    ]
    optimizer = torch.optim.AdamW(parameters, scale.teaching_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    steps = scale.teaching_epochs * -(-len(records) // scale.batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(scale.teaching_epochs):
        for rows in torch.randperm(len(records), generator=generator).split(
            scale.batch
        ):
            batch = joined([records[i] for i in rows.tolist()])
            optimizer.zero_grad()
            (-likelihoods(upper(batch), batch).mean()).backward()
            optimizer.step()
            schedule.step()


def refer(records: Records, taught: Upper, target: Upper) -> None:
    """Stores in the records what the two models say of them."""
    with torch.no_grad():
        for row in records:
            batch = joined([row])
            policy = taught(batch)
            found = {"taught": likelihoods(policy, batch)[0]}
            found["target"] = likelihoods(target(batch), batch)[0]
            row.update(found, policy=policy)


def prepare(
    model: Any, tokenizer: Any, data: Path, output: Path, seed: int, scale: Scale
) -> tuple[Records, Upper, Upper]:
    """A seed's records, the taught layers and the target's; kept in a file beside the CSV."""
    path = output.with_name(f"{output.stem}-{seed}.pt")
    taught, target = (copy.deepcopy(Upper(model, scale.layers)) for _ in range(2))
    if not path.exists():
        records = draw(data, model, tokenizer, seed, scale)
        teach(taught, records, seed, scale)
        teach(target, Records(row for row in records if not row["forget"]), seed, scale)
        refer(records, taught, target)
        learned = [upper.layers.state_dict() for upper in (taught, target)]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save([list(records), *learned], path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").replace(path)
    rows, *learned = torch.load(path, weights_only=True)
    taught.layers.load_state_dict(learned[0])
    target.layers.load_state_dict(learned[1])
    return Records(rows), taught, target


# Methods ----------------------------------------------------------------------------------------


class Unlearning(PointwiseModule):
    """The objective on what is kept, the constraints that a method knows on both."""

    def __init__(self, upper: Upper, method: Method, rate: float) -> None:
        super().__init__(
            formulation=method.formulation(),
            constraints=CONSTRAINTS[method.requirement],
            training=Training(Optimization(rate, 0.0, "linear")),
        )
        self.upper, self.requirement = upper, method.requirement

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = joined(batch["records"])
        return self.upper(tokens), tokens

    def membership(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        forget = batch["forget"]
        masks = {"objective": ~forget, "forget": forget}
        return masks | ({"keep": ~forget} if "keep" in self.constraints else {})

    def objective(
        self, outputs: tuple[Tensor, dict[str, Tensor]], batch: Any
    ) -> Tensor:
        return divergences(*outputs)

    def constraint_values(
        self, outputs: tuple[Tensor, dict[str, Tensor]], batch: Any
    ) -> dict[str, Tensor]:
        found, tokens = likelihoods(*outputs), outputs[1]
        if self.requirement == "two-sided":
            return {
                "forget": found - tokens["target"],
                "keep": found - tokens["taught"],
            }
        if self.requirement == "likelihood":
            return {"forget": found}
        ratio = (found - tokens["taught"]) * tokens["lengths"]
        return {"forget": 2 / NPO_BETA * softplus(NPO_BETA * ratio)}


CONSTRAINTS = {
    "two-sided": {
        "forget": Constraint(at_least=-BAND, at_most=BAND),
        "keep": Constraint(at_least=-LOSS),
    },
    "likelihood": {"forget": Constraint(at_most=0.0)},  # Gradient difference.
    "NPO": {"forget": Constraint(at_most=0.0)},
}


@dataclass(frozen=True)
class Method:
    family: str
    formulation: Callable[[], Formulation]
    requirement: str = "two-sided"


def _penalty(
    family: str, weight: float, shape: Any, requirement: str = "two-sided"
) -> Method:
    return Method(family, lambda: Penalty(weight=weight, shape=shape), requirement)


OURS = "untuned"
METHODS = {
    "Pointwise()": Method(OURS, Pointwise),
    "Relaxed(price=10)": Method(OURS, lambda: Relaxed(price=10.0)),
    **{f"hinge {w:g}": _penalty("hinge", w, "hinge") for w in (0.3, 1, 3, 10, 30)},
    **{
        f"squared hinge {w:g}": _penalty("squared hinge", w, "squared_hinge")
        for w in (1, 3, 10, 30)
    },
    "average 0.1": Method("average", lambda: Average(dual_lr=0.1)),
    "average 1": Method("average", lambda: Average(dual_lr=1.0)),
    "average 1, alpha 1": Method("average", lambda: Average(dual_lr=1.0, alpha=1.0)),
    **{
        f"gradient difference {w:g}": _penalty(
            "gradient difference", w, "linear", "likelihood"
        )
        for w in (0.1, 0.2, 0.3)
    },
    **{f"NPO {w:g}": _penalty("NPO", w, "linear", "NPO") for w in (0.03, 0.1, 0.3)},
}


# Runs -------------------------------------------------------------------------------------------


def measure(upper: Upper, records: Records) -> dict[str, float]:
    """How many samples miss their requirement, by how much, and the KL on what is kept."""
    from_target, from_taught, divergence = [], [], []
    with torch.no_grad():
        for row in records:
            batch = joined([row])
            policy = upper(batch)
            found = likelihoods(policy, batch)
            if row["forget"]:
                from_target.append(found - row["target"])
            else:
                from_taught.append(found - row["taught"])
                divergence.append(divergences(policy, batch))
    forgotten, kept = torch.cat(from_target), torch.cat(from_taught)
    excess, lost = forgotten.abs() - BAND, -LOSS - kept
    return {
        "outside or lost": int((excess > 0).sum() + (lost > 0).sum()),
        "the same beyond the grace": int((excess > GRACE).sum() + (lost > GRACE).sum()),
        "kl": float(torch.cat(divergence).mean()),
        "forget: outside": float((excess > 0).float().mean()),
        "forget: too little": float((forgotten > BAND + GRACE).float().mean()),
        "forget: too far": float((-forgotten > BAND + GRACE).float().mean()),
        "forget: worst excess": float(excess.max().clamp(min=0)),
        "keep: lost": float((lost > 0).float().mean()),
        "keep: lost beyond the grace": float((lost > GRACE).float().mean()),
        "keep: worst excess": float(lost.max().clamp(min=0)),
    }


def run(
    taught: Upper, records: Records, method: Method, seed: int, scale: Scale
) -> Upper:
    """A copy of the taught model, fine-tuned with the method."""
    seed_everything(seed, verbose=False)
    module = Unlearning(copy.deepcopy(taught), method, scale.rate)
    trainer = Trainer(
        max_epochs=scale.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Samples(records, scale.batch, seed))
    return module.upper


def read(path: Path) -> pd.DataFrame:
    """The runs so far."""
    return (
        pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["seed", "method"])
    )


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def choose(table: pd.DataFrame) -> list[str]:
    """Ours, and of each rival family the setting that is best on the tuning seed."""
    tried = table[(table["seed"] == TUNING_SEED) & table["method"].isin(METHODS)]
    tried = tried.sort_values(["outside or lost", "kl"])
    rivals = (
        tried[tried["family"] != OURS].groupby("family", sort=False)["method"].first()
    )
    chosen = {name for name, method in METHODS.items() if method.family == OURS} | set(
        rivals
    )
    return [name for name in METHODS if name in chosen]


def summarise(table: pd.DataFrame) -> str:
    """Medians over the seeds that judge, with the range."""
    judged = table[table["seed"] != TUNING_SEED].drop(
        columns=["seed", "family", "seconds"]
    )
    lines = []
    for name, rows in judged.groupby("method", sort=False):
        cells = [
            f"{rows[column].median():.3g} ({rows[column].min():.3g}–{rows[column].max():.3g})"
            for column in rows.columns.drop("method")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    columns = ["method", *judged.columns.drop("method")]
    return "\n".join(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines]
    )


def study(
    model: Any,
    tokenizer: Any,
    data: Path,
    output: Path,
    seeds: Sequence[int],
    methods: Sequence[str] | None,
    scale: Scale,
) -> None:
    """Runs what the CSV lacks of ``methods``: None is all on the tuning seed, else the chosen."""
    for seed in seeds:
        table = read(output)
        names = methods or (METHODS if seed == TUNING_SEED else choose(table))
        done = set(table["method"][table["seed"] == seed])
        due = [name for name in names if name not in done]
        if not due:
            continue
        records, taught, target = prepare(model, tokenizer, data, output, seed, scale)
        for name in [*(n for n in ("taught", "target") if n not in done), *due]:
            started = time.perf_counter()
            trained = {"taught": taught, "target": target}.get(name)
            family = "reference" if trained else METHODS[name].family
            trained = trained or run(taught, records, METHODS[name], seed, scale)
            seconds = round(time.perf_counter() - started, 1)
            measured = {k: f"{v:.5g}" for k, v in measure(trained, records).items()}
            row = {
                "seed": seed,
                "method": name,
                "family": family,
                **measured,
                "seconds": seconds,
            }
            append(output, row)
            print(*row.values(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[TUNING_SEED, 0, 1, 2, 3, 4]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--output", type=Path, default=Path("results/two_sided.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pl_pointwise", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = str(arguments.models / MODEL)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    study(
        model.eval(),
        tokenizer,
        arguments.data,
        arguments.output,
        arguments.seeds,
        arguments.methods,
        Scale(),
    )
    print(summarise(read(arguments.output)))


if __name__ == "__main__":
    main()
