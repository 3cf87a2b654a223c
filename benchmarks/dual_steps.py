"""Which dual step makes a constraint hold within ten visits: the rules tried, side by side.

    python benchmarks/dual_steps.py
    python benchmarks/dual_steps.py --cross-encoder MODEL RECORDS

Two problems, in plain PyTorch on the package's ψ. Retention: a small network learns transposed
digits (cross-entropy) and must keep KL(old model ‖ new) ≤ .05 on each of 400 plain ones; it starts
satisfied. Re-ranking, with a model and MS MARCO records: three layers on frozen features of a
cross-encoder; the length objective Λ, and s_p − s_n ≥ 3 for nine negatives; queries are split.
Ten epochs of batches of 16, AdamW with a linear schedule.

Printed, means over the seeds (splits, weights, order): share violated and CVaR95, training ·
held-out; the objective, held-out; λ's share of the pull over the last epoch, and the part of the
pull that fell on satisfied values (overshoot). α is in units of the first one that
pl_pointwise.adaptive_alpha would take. One thread.
"""

from __future__ import annotations

import argparse
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from pl_pointwise import Penalty, Pointwise, Relaxed
from pl_pointwise.tasks.reranker.lambda_loss import length_biased_lambda_loss

EPOCHS, BATCH = 10, 16
FACTORS = (0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Rule:
    """A dual step, as changes to λ ← (λ + η ∂ψ/∂λ)₊ with η = κ·2α.

    Args:
        kappa: κ; 0 is a squared hinge.
        growth: after an epoch whose violations are more than so many times the last one's, in root
            mean square, α is multiplied by the second number, unless at most 1 in 20 is violated.
        shrink: κ / visits^shrink.
        down: κ where λ falls; None takes κ.
        decay: factor on λ at a visit that is satisfied.
        proportional: what a change of v since the last visit adds to λ, in units of 2α.
        first: λ starts at this times (2αv)₊ of a pass over the data.
        dual_first: the weights follow λ after its step.
        hard: share of each epoch drawn in proportion to the pull, with weights that keep the mean.
        function: λ is softplus of a linear head on the sample's features, regressed to the pull.
        beta: price of a quadratic relaxation.
    """

    kappa: float = 1.0
    growth: tuple[float, float] | None = None
    shrink: float = 0.0
    down: float | None = None
    decay: float = 1.0
    proportional: float = 0.0
    first: float = 0.0
    dual_first: bool = False
    hard: float = 0.0
    function: bool = False
    beta: float | None = None


RULES = {
    "η = 0 (squared hinge)": Rule(0.0),
    "η = .1α (the paper's, re-ranking)": Rule(0.05),
    "η = .4α": Rule(0.2),
    "η = 2α": Rule(1.0),
    "η = 2α, α × 2 while not halved": Rule(1.0, growth=(0.5, 2.0)),
    "η = 2α, α × 3 while not halved": Rule(1.0, growth=(0.5, 3.0)),
    "η = α, α × 2 while not halved": Rule(0.5, growth=(0.5, 2.0)),
    "η = 2α / √visits": Rule(1.0, shrink=0.5),
    "η = 2α / visits": Rule(1.0, shrink=1.0),
    "η = .4α, falling λ by 2α": Rule(0.2, down=1.0),
    "η = 2α, falling λ by 4α": Rule(1.0, down=2.0),
    "η = 2α, λ halved where satisfied": Rule(1.0, decay=0.5),
    "η = .4α, and 2α of the change of v": Rule(0.2, proportional=1.0),
    "η = .4α, λ from a pass": Rule(0.2, first=1.0),
    "η = 2α, λ first": Rule(1.0, dual_first=True),
    "η = .4α, half of the draws by pull": Rule(0.2, hard=0.5),
    "λ a function of the features": Rule(1.0, function=True),
}


class Problem(ABC):
    """Samples, split by seed: the objective (b,), the violations (b, K) and features (b, K, F)."""

    learning_rate: float
    train: Tensor
    test: Tensor
    columns: int
    width: int

    @abstractmethod
    def start(self) -> nn.Module: ...

    @abstractmethod
    def terms(self, model: nn.Module, index: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def features(self, index: Tensor) -> Tensor: ...


class Retention(Problem):
    learning_rate, columns, width = 3e-3, 1, 64

    def __init__(self, seed: int) -> None:
        digits = load_digits()
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(seed))
        x = torch.tensor(digits.data / 16 - 0.3, dtype=torch.float32)[order]
        y = torch.tensor(digits.target)[order]
        torch.manual_seed(100 + seed)
        old = self._network()
        optimizer = torch.optim.AdamW(old.parameters(), 3e-3)
        for _ in range(150):
            loss = cross_entropy(old(x[:600]), y[:600])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.weights, self.kept, self.labels = old.state_dict(), x[600:], y[600:]
        self.new = self.kept.view(-1, 8, 8).transpose(1, 2).flatten(1)
        with torch.no_grad():
            self.old = old(self.kept).log_softmax(-1)
        self.train, self.test = torch.arange(400), torch.arange(400, 800)

    def _network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def start(self) -> nn.Module:
        model = self._network()
        model.load_state_dict(self.weights)
        return model

    def terms(self, model: nn.Module, index: Tensor) -> tuple[Tensor, Tensor]:
        objective = cross_entropy(model(self.new[index]), self.labels[index], reduction="none")
        new, old = model(self.kept[index]).log_softmax(-1), self.old[index]
        return objective, (old.exp() * (old - new)).sum(-1, keepdim=True) - 0.05

    def features(self, index: Tensor) -> Tensor:
        return self.kept[index][:, None]


class Reranking(Problem):
    learning_rate, columns, width = 1e-3, 9, 256

    def __init__(self, seed: int, features: Tensor, lengths: Tensor, queries: list[int]) -> None:
        self.x, self.lengths = features, lengths
        distinct = sorted(set(queries))
        order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed))
        trained = {distinct[i] for i in order[: int(0.6 * len(distinct))]}
        inside = torch.tensor([query in trained for query in queries])
        # Every second record: those of a query are much alike.
        self.train, self.test = inside.nonzero()[::2, 0], (~inside).nonzero()[::2, 0]
        self.width = features.shape[-1]

    def start(self) -> nn.Module:
        layers = [nn.Linear(self.width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(256, 1))

    def terms(self, model: nn.Module, index: Tensor) -> tuple[Tensor, Tensor]:
        scores = model(self.x[index])[..., 0]
        everyone = torch.ones_like(scores, dtype=torch.bool)
        objective = length_biased_lambda_loss(scores, self.lengths[index], everyone)
        return objective, 3.0 - (scores[:, :1] - scores[:, 1:])

    def features(self, index: Tensor) -> Tensor:
        return self.x[index][:, 1:] - self.x[index][:, :1]


class Multipliers:
    """λ of the training samples under a rule."""

    def __init__(self, rule: Rule, problem: Problem, alpha: float, violation: Tensor) -> None:
        self.rule, self.problem, self.alpha = rule, problem, alpha
        self.values = torch.zeros_like(violation)
        if rule.first:
            self.values = rule.first * (2 * alpha * violation).clamp(min=0)
        self.visits = torch.zeros(len(violation), 1)
        self.last = torch.full_like(violation, math.nan)
        self.head = nn.Linear(problem.width, 1)
        nn.init.constant_(self.head.bias, -4.0)  # λ starts near 0.
        self.optimizer = torch.optim.AdamW(self.head.parameters(), 1e-2)

    def of(self, rows: Tensor) -> Tensor:
        if not self.rule.function:
            return self.values[rows]
        with torch.no_grad():
            return softplus(self._head(rows)) * 2 * self.alpha

    def stepped(self, rows: Tensor, violation: Tensor) -> Tensor:
        rule, before = self.rule, self.values[rows]
        direction = self.formulation().dual_direction(violation, before)
        up = rule.kappa / (1 + self.visits[rows]) ** rule.shrink
        down = up if rule.down is None else torch.full_like(up, rule.down)
        after = before + 2 * self.alpha * torch.where(direction > 0, up, down) * direction
        if rule.proportional:
            change = (violation - self.last[rows]).nan_to_num(0.0)
            after = after + rule.proportional * 2 * self.alpha * change
        after = after.clamp(min=0)
        return torch.where(violation < 0, rule.decay * after, after)

    def step(self, rows: Tensor, violation: Tensor) -> None:
        if self.rule.function:
            pull = (self.of(rows) + 2 * self.alpha * violation).clamp(min=0) / (2 * self.alpha)
            loss = (softplus(self._head(rows)) - pull).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        else:
            self.values[rows] = self.stepped(rows, violation)
        self.visits[rows] += 1
        self.last[rows] = violation

    def formulation(self) -> Pointwise | Relaxed:
        if self.rule.beta is not None:
            return Relaxed(alpha=self.alpha, beta=self.rule.beta)
        return Pointwise(alpha=self.alpha)

    def order(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """An epoch's rows, and the weight of each."""
        count = len(self.values)
        if not self.rule.hard or self.last.isnan().any():
            return torch.randperm(count, generator=generator), torch.ones(count)
        pull = (self.values + 2 * self.alpha * self.last).clamp(min=0).mean(1)
        chance = (1 - self.rule.hard) / count + self.rule.hard * pull / pull.sum().clamp(min=1e-9)
        rows = torch.multinomial(chance, count, replacement=True, generator=generator)
        return rows, 1 / (count * chance)

    def _head(self, rows: Tensor) -> Tensor:
        return self.head(self.problem.features(self.problem.train[rows]))[..., 0]


def fit(problem: Problem, rule: Rule | Penalty, factor: float, seed: int) -> dict[str, float]:
    """Trains once; α is ``factor`` times its first value by itself."""
    torch.manual_seed(seed)
    model, generator = problem.start(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), problem.learning_rate, weight_decay=0.0)
    steps = EPOCHS * math.ceil(len(problem.train) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    with torch.no_grad():
        objective, violation = problem.terms(model, problem.train)
    violated = (violation > 0).float().mean() > 0.05
    square = violation.clamp(min=0).square().mean() if violated else torch.tensor(1.0)
    alpha = factor * float(objective.mean() / square)
    learned = rule if isinstance(rule, Rule) else Rule(0.0)
    multipliers = Multipliers(learned, problem, alpha, violation)
    before = math.inf
    for _ in range(EPOCHS):
        pulls, seen = [], []
        order, weights = multipliers.order(generator)
        for rows in order.split(BATCH):
            objective, violation = problem.terms(model, problem.train[rows])
            found = violation.detach()
            current = multipliers.of(rows)
            if learned.dual_first:
                current = multipliers.stepped(rows, found)
            formulation = rule if isinstance(rule, Penalty) else multipliers.formulation()
            psi = formulation.lagrangian(violation, current).mean(1)
            loss = ((objective + psi) * weights[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            pull = (current + 2 * multipliers.alpha * found).clamp(min=0)
            pulls.append(torch.stack([pull, torch.minimum(current, pull), pull * (found < 0)]))
            seen.append(found)
            if isinstance(rule, Rule):
                multipliers.step(rows, found)
        excess = torch.cat(seen).clamp(min=0)
        size = float(excess.square().mean().sqrt())
        met = float((excess > 0).float().mean()) <= 0.05
        if learned.growth and not met and learned.growth[0] * before < size < math.inf:
            multipliers.alpha *= learned.growth[1] if before < math.inf else 1.0
        before = size
    total, carried, satisfied = torch.cat(pulls, 1).sum((1, 2)).tolist()
    with torch.no_grad():
        trained, tested = problem.terms(model, problem.train), problem.terms(model, problem.test)
    return {
        "violated": float((trained[1] > 0).float().mean()),
        "violated, held-out": float((tested[1] > 0).float().mean()),
        "cvar": tail(trained[1]),
        "cvar, held-out": tail(tested[1]),
        "objective, held-out": float(tested[0].mean()),
        "share": carried / total if total else math.nan,
        "overshoot": satisfied / total if total else math.nan,
    }


def tail(violation: Tensor) -> float:
    values = violation.flatten()
    return float(values[values >= values.quantile(0.95)].mean())


def frozen(model: str, records: Path) -> tuple[Tensor, Tensor, list[int]]:
    """Standardised features (N, 10, F), the positive first, token counts (N, 10), and queries."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model, use_safetensors=True).eval()
    rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    features, lengths = [], []
    for row in rows:
        passages = row["passages"]
        first = passages["is_selected"].index(1)
        order = [first, *(i for i in range(len(passages["is_selected"])) if i != first)]
        texts = [passages["passage_text"][i] for i in order]
        pairs = [f"Query: {row['query']}\nSentence: {text}" for text in texts]
        batch = tokenizer(pairs, padding=True, truncation=True, max_length=192, return_tensors="pt")
        with torch.no_grad():
            features.append(network.base_model(**batch).pooler_output)
        lengths.append(batch["attention_mask"].sum(1).float())
    stacked = torch.stack(features)
    standard = (stacked - stacked.mean((0, 1))) / stacked.std((0, 1))
    return standard, torch.stack(lengths), [row["query_id"] for row in rows]


def print_table(make: Callable[[int], Problem], seeds: int) -> None:
    problems = [make(seed) for seed in range(seeds)]
    columns = "| rule | α | violated | CVaR95 | objective | λ's share | overshoot |"
    print(columns, "|---" * 7 + "|", sep="\n", flush=True)
    penalties: dict[str, list[Penalty]] = {
        shape: [Penalty(weight=w, shape=shape) for w in (0.1, 0.3, 1, 3, 10)]  # type: ignore[arg-type]
        for shape in ("linear", "hinge")
    }
    for shape, tried in penalties.items():
        for penalty in tried:
            print_row(f"{shape} penalty {penalty.weight:g}", "–", problems, penalty, 1.0)
    for name, rule in RULES.items():
        for factor in FACTORS:
            print_row(name, f"{factor:g}", problems, rule, factor)


def print_row(
    name: str, alpha: str, problems: list[Problem], rule: Rule | Penalty, factor: float
) -> None:
    runs = [fit(problem, rule, factor, seed) for seed, problem in enumerate(problems)]
    mean = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
    cells = [
        f"{mean['violated']:.2f} · {mean['violated, held-out']:.2f}",
        f"{mean['cvar']:.3g} · {mean['cvar, held-out']:.3g}",
        f"{mean['objective, held-out']:.3g}",
        "–" if isinstance(rule, Penalty) else f"{mean['share']:.2f}",
        "–" if isinstance(rule, Penalty) else f"{mean['overshoot']:.2f}",
    ]
    print(f"| {name} | {alpha} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cross-encoder", nargs=2, metavar=("MODEL", "RECORDS"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("\nRetention\n")
    print_table(Retention, arguments.seeds)
    if arguments.cross_encoder:
        found = frozen(arguments.cross_encoder[0], Path(arguments.cross_encoder[1]))
        print("\nRe-ranking\n")
        print_table(lambda seed: Reranking(seed, *found), arguments.seeds)


if __name__ == "__main__":
    main()
