"""What the paper's three tables would cost on one GPU: an estimate, from stated inputs alone.

    python benchmarks/cost.py --peak 989e12 --mfu 0.3 --euros-per-hour 3

Nothing here is measured. Time is FLOPs / (peak × MFU) of the training passes, for every method of
the table, and likewise of plain DPO on the same samples; evaluation, generated answers, downloads
and the start of a run are left out. Of a weight in a matrix product a token costs 2 FLOPs forward,
2 for the gradient of the activations, and 2 for that of the weight where it is trained; attention
4 · width · layers a pair of tokens, forward. Ours:

- a prompt is encoded once for all its responses, logits are those of response tokens;
- the reference is computed in the first epoch and kept;

and DPO as it is commonly run: every response with its own copy of the prompt, logits of all
tokens, the reference in every epoch, by the same adapters. Where the table's samples are no
preference pairs, there is no DPO to compare with: re-ranking has none, and of safety's prompts DPO
takes the unsafe ones' pairs, of a refusal and an answer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What of a model costs time."""

    layers: float  # weights in the layers' matrix products
    depth: int
    width: int
    vocabulary: int
    trained: bool = False  # all weights, or adapters

    def layer_flops(self, length: float, tokens: float, backward: bool) -> float:
        """Of so many tokens in sequences of so many, half of which each sees on average."""
        products = 2 * self.layers * tokens
        attention = 4 * self.width * self.depth * tokens * length / 2
        # The gradient of both factors of attention's products, in any case.
        return products * self._passes(backward) + attention * (3 if backward else 1)

    def head_flops(self, tokens: float, backward: bool) -> float:
        return 2 * self.width * self.vocabulary * tokens * self._passes(backward)

    def _passes(self, backward: bool) -> int:
        return 1 if not backward else 3 if self.trained else 2


@dataclass(frozen=True)
class Task:
    """The samples of one epoch, and how many runs the table has."""

    model: Model
    samples: int
    prompt: float  # tokens, mean
    responses: tuple[float, ...]  # tokens of each, mean
    epochs: int
    runs: int
    reference_responses: tuple[int, ...] = ()  # those of which a reference is needed
    pairs: int | None = None  # samples that DPO takes; None where it takes none
    pair: tuple[float, float] = (0, 0)

    def ours(self) -> float:
        """FLOPs of one run."""
        model, length = self.model, self.prompt + max(self.responses, default=0)
        tokens = self.prompt + sum(self.responses)
        step = model.layer_flops(length, tokens, True)
        step += model.head_flops(sum(self.responses), True)
        kept = sum(self.responses[i] for i in self.reference_responses)
        first = model.layer_flops(length, self.prompt + kept, False) if kept else 0.0
        # Kept are the hidden states, not the logits.
        head = model.head_flops(kept, False)
        return self.samples * (self.epochs * (step + head) + first)

    def dpo(self) -> float | None:
        """FLOPs of one run of plain DPO."""
        if self.pairs is None:
            return None
        model, total = self.model, 0.0
        for response in self.pair:
            tokens = self.prompt + response
            for backward in (True, False):  # The policy, the reference.
                total += model.layer_flops(tokens, tokens, backward)
                total += model.head_flops(tokens, backward)
        return self.pairs * self.epochs * total


# Weights by each model's published configuration; samples, epochs and runs by this package's
# (base.yaml and compare/table.yaml). Of tokens: see the README.
TASKS = {
    "re-ranking, ModernBERT-base": Task(
        Model(110e6, 22, 768, 0, trained=True),
        samples=50_000 * 10,
        prompt=100,
        responses=(),
        epochs=10,
        runs=20,
    ),
    "When2Call, Llama-3.2-1B": Task(
        Model(973e6, 16, 2048, 128_256),
        samples=8_550,
        prompt=800,
        responses=(50, 50),
        epochs=10,
        runs=8,
        reference_responses=(0, 1),
        pairs=8_550,
        pair=(50, 50),
    ),
    # 1,000 benign prompts with their answers and 12,000 unsafe ones with a refusal, averaged.
    "safety, Llama-7B": Task(
        Model(6.48e9, 32, 4096, 32_000),
        samples=13_000,
        prompt=25,
        responses=(15, 30),
        epochs=10,
        runs=16,
        reference_responses=(1,),
        pairs=12_000,
        pair=(15, 120),
    ),
}


def hours(flops: float, peak: float, mfu: float) -> float:
    return flops / (peak * mfu) / 3600


def table(peak: float, mfu: float, price: float) -> str:
    """Hours and euros of every task's table, and of one run beside plain DPO."""
    lines = [
        "| task | runs | hours a run | hours a table | € a table | plain DPO, hours a run "
        "| ours / DPO | € a run: ours, DPO |",
        "|---" * 8 + "|",
    ]
    whole = 0.0
    for name, task in TASKS.items():
        own, dpo = hours(task.ours(), peak, mfu), task.dpo()
        whole += task.runs * own
        lines.append(
            f"| {name} | {task.runs} | {own:.2f} | {task.runs * own:.1f} "
            f"| {task.runs * own * price:.0f} "
        )
        if dpo is None:
            lines[-1] += f"| – | – | {own * price:.2f}, – |"
        else:
            other = hours(dpo, peak, mfu)
            lines[-1] += f"| {other:.2f} | {own / other:.2f} "
            lines[-1] += f"| {own * price:.2f}, {other * price:.2f} |"
    lines.append(f"| together | | | {whole:.1f} | {whole * price:.0f} | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peak", type=float, default=989e12, help="FLOP/s, dense bf16 of an H100"
    )
    parser.add_argument(
        "--mfu", type=float, default=0.3, help="share of it that is reached"
    )
    parser.add_argument("--euros-per-hour", type=float, default=3.0, help="of the GPU")
    arguments = parser.parse_args()
    print(table(arguments.peak, arguments.mfu, arguments.euros_per_hour))


if __name__ == "__main__":
    main()
