"""Every door gives the same care: what is checked, what is saved, and whose the weights are."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pl_pointwise import Constraint, Pointwise, PointwiseLoss
from pl_pointwise.errors import DataError, TrainingError
from tests.pl_pointwise.toy import Toy, ToyRows, fit
from tests.programs.launch import run_on_ranks

BOUND = {"fit": Constraint(at_most=0.2)}
ROWS = 24


class Plain:
    """A regression in a loop of one's own, with what may go wrong in one."""

    def __init__(
        self, samples: int = ROWS, parameters: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(ROWS, 3)
        self.y = self.x.sum(1) + 1
        self.net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.source = self.net if parameters == "model" else parameters
        formulation = options.pop("formulation", Pointwise())
        self.loss = PointwiseLoss(
            BOUND, formulation, samples=samples, parameters=self.source, **options
        )
        self.said: list[str] = []
        self.loss._lagrangian.warn = self.said.append
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.net(self.x[rows])[:, 0]
        return outputs.square(), (outputs - self.y[rows]).abs()

    def of(self, rows: Tensor, index: Tensor | None = None, **options: Any) -> Tensor:
        objective, values = self.values(rows)
        return self.loss(
            objective, {"fit": values}, rows if index is None else index, **options
        )

    def step(self, rows: Tensor, index: Tensor | None = None) -> None:
        self.optimizer.zero_grad()
        self.of(rows, index).backward()
        self.optimizer.step()
        self.loss.step()

    def train(self, epochs: int = 4, place_in_batch: bool = False) -> None:
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(epoch)
            for rows in torch.randperm(ROWS, generator=generator).split(6):
                self.step(rows, torch.arange(len(rows)) if place_in_batch else None)


# What is checked: one list for module and loss ---------------------------------------------------


class Wrong(Toy):
    """The toy with a mistake in its values."""

    def __init__(self, mistake: str) -> None:
        super().__init__(Pointwise(), constraints=BOUND)
        self.mistake = mistake

    def constraint_values(self, outputs: Tensor, batch: Any) -> Any:
        error = (outputs - batch["y"]).abs()
        return {"fit": MISTAKES[self.mistake](error)}


MISTAKES: dict[str, Any] = {
    "detached": lambda error: error.detach(),
    "compared": lambda error: (error > 0.5).float(),
    "broadcast": lambda error: error[:, None] - error[None, :].detach(),
    "clamped": lambda error: (error - 1.0).clamp(min=0),
    "right": lambda error: error,
}
SAID = {
    "detached": 'Constraint "fit": its values have no gradient',
    "compared": 'Constraint "fit": its values have no gradient',
    "broadcast": "as many values a sample as the batch has samples",
    "clamped": "are exactly 0, and none is below",
    "right": None,
}


def of_module(mistake: str) -> list[str]:
    module = Wrong(mistake)
    said: list[str] = []
    module._lagrangian.warn = said.append
    try:
        fit(module, ToyRows(12), epochs=6)
    except TrainingError as error:
        said.append(str(error))
    return said


def of_loss(mistake: str) -> list[str]:
    loop = Plain()
    own = loop.values

    def values(rows: Tensor) -> tuple[Tensor, Tensor]:
        objective, error = own(rows)
        return objective, MISTAKES[mistake](error)

    loop.values = values  # type: ignore[method-assign]
    try:
        loop.train(8)
    except TrainingError as error:
        loop.said.append(str(error))
    return loop.said


FORMS: dict[str, tuple[Any, Any, str]] = {
    "no dict": (lambda v: v, {}, "values is a Tensor: give a dict by name"),
    "a name": (lambda v: {"fits": v}, {}, "values names 'fits': the names are 'fit'"),
    "none": (lambda v: {"fit": None}, {}, r'values\["fit"\] is None'),
    "complex": (lambda v: {"fit": v.to(torch.complex64)}, {}, "must be real numbers"),
    "sparse": (
        lambda v: {"fit": v.to_sparse()},
        {},
        "must be real numbers, a dense tensor",
    ),
    "no columns": (lambda v: {"fit": v[:, None][:, :0]}, {}, "one column at least"),
    "mask": (
        lambda v: {"fit": v},
        {"masks": {"fit": torch.ones(6)}},
        r'^masks\["fit"\] must be bool',
    ),
    "strict": (
        lambda v: {"fit": v},
        {"strict": torch.ones(6)},
        "strict is a Tensor: give a dict",
    ),
    "counts": (
        lambda v: {"fit": v},
        {"counts": {"objective": 6, "fit": -6}},
        "whole number from 0",
    ),
    "half counts": (
        lambda v: {"fit": v},
        {"counts": {"objective": 6.5, "fit": 6}},
        "from 0",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_loop_gives_is_refused_in_its_own_words(form: str) -> None:
    values, options, expected = FORMS[form]
    loop, rows = Plain(), torch.arange(6)
    objective, fit = loop.values(rows)
    with pytest.raises((TrainingError, ValueError), match=expected) as refused:
        loop.loss(objective, values(fit), rows, **options)
    assert "constraint_values()" not in str(refused.value)
    assert "membership()" not in str(refused.value)


def test_values_that_were_broadcast_are_told_at_the_last_batch_too() -> None:
    """It spoke of membership(), which a loop does not have, and not of the broadcast."""
    loss = PointwiseLoss(BOUND, Pointwise(alpha=1.0, dual_lr=1.0), samples=10)
    weight = torch.ones((), requires_grad=True)
    targets = torch.linspace(0, 1, 10)

    def step(rows: Tensor) -> None:
        wrong = (weight * targets[rows, None] - targets[rows]).abs()
        loss(weight * targets[rows], {"fit": wrong}, rows).backward()
        loss.step()

    step(torch.arange(6))
    with pytest.raises(TrainingError) as caught:
        step(torch.arange(6, 10))
    for part in (
        "(B, 1) was broadcast against (B,)",
        "missing in masks.",
        "constrained.multi",
    ):
        assert part in str(caught.value)
    assert "membership()" not in str(caught.value)


def test_a_loop_is_told_of_its_own_index_and_multipliers() -> None:
    """Errors spoke of batch["index"] and module.multipliers."""
    weight = torch.ones((), requires_grad=True)

    def of(index: list[int], before: Tensor | None = None) -> None:
        loss = PointwiseLoss(BOUND, Pointwise(alpha=1.0, dual_lr=1.0), samples=4)
        if before is not None:
            loss.multipliers.set("fit", before)
        values = weight * torch.ones(len(index))
        loss(values, {"fit": values}, torch.tensor(index))

    for index, before, said in (
        ([0, 9], None, "samples: index is each sample's position"),
        ([0, -7], None, "^index holds -7"),
        ([0, 1], torch.ones(4, 3), r"Give constrained\.multipliers\.set"),
    ):
        with pytest.raises((DataError, TrainingError), match=said) as caught:
            of(index, before)
        assert 'batch["index"]' not in str(caught.value)
        assert "module" not in str(caught.value)


def test_parameters_that_are_none_are_refused() -> None:
    net = nn.Linear(3, 1)
    wrong: list[Any] = [net.weight, "weights", net.named_parameters(), net.state_dict()]
    wrong.append(torch.optim.SGD(net.parameters(), lr=0.1))
    for each in wrong:
        with pytest.raises(DataError, match=r"give the model, model.parameters\(\)"):
            Plain(parameters=each)
    Plain(parameters=net.parameters).step(torch.arange(6))


class DeepSpeedEngine(nn.Module):
    """By its name and module."""

    __module__ = "deepspeed.runtime.engine"


def test_wrappers_that_hide_gradients_are_refused(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped: list[Any] = [DeepSpeedEngine()]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped.append(
            FullyShardedDataParallel(nn.Linear(3, 1), device_id=torch.device("cpu"))
        )
    finally:
        torch.distributed.destroy_process_group()
    for each in [*wrapped, nn.Sequential(wrapped[1]), wrapped[1].parameters()]:
        with pytest.raises(TrainingError, match="Take FSDP2"):
            Plain(parameters=each)
    with pytest.raises(TrainingError, match="Take FSDP2"):  # It is made later.
        Plain(parameters=lambda: wrapped[1]).step(torch.arange(6))


def test_reentrant_checkpointing_is_refused_in_one_sentence() -> None:
    from torch.utils.checkpoint import checkpoint

    loop = Plain()
    net = loop.net
    loop.net = lambda x: checkpoint(net, x.requires_grad_(), use_reentrant=True)
    with pytest.raises(TrainingError, match="Set use_reentrant=False"):
        loop.step(torch.arange(6))


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("door", [of_module, of_loss])
def test_both_doors_tell_the_same_mistakes(door: Any, mistake: str) -> None:
    expected, said = SAID[mistake], door(mistake)
    if expected is None:
        assert not said
    else:
        assert [expected in each for each in said].count(True) == 1, said


def test_an_index_that_is_the_place_in_the_batch_is_told() -> None:
    loop = Plain()
    loop.train(place_in_batch=True)
    assert [each for each in loop.said if "had only 6 of the 24 positions" in each]
    loop = Plain(samples=240)  # Ten times too many.
    loop.train()
    assert ["24 of the 240 positions" in each for each in loop.said] == [True]
    right = Plain()
    right.train()
    assert not right.said


# Whose the weights are ---------------------------------------------------------------------------


def test_weights_are_asked_for_at_each_measurement() -> None:
    """Frozen in mid-run it failed; unfrozen later they were never compared."""
    changing, asked = Plain(parameters="model"), Plain()
    for loop in (changing, asked):
        loop.net[0].requires_grad_(False)
        loop.train(1)
        loop.net[0].requires_grad_(True)
        loop.train(1)
        loop.net[2].requires_grad_(False)
        loop.train(2)
    assert (
        changing.loss._lagrangian.units.state_dict()
        == asked.loss._lagrangian.units.state_dict()
    )
    assert torch.equal(changing.loss.multipliers["fit"], asked.loss.multipliers["fit"])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "new model"])
def test_a_copy_measures_its_own_weights(how: str) -> None:
    whole, copied = Plain(parameters="model"), Plain(parameters="model")
    for loop in (whole, copied):
        loop.train(1)
    if how == "new model":
        copied.net = copy.deepcopy(copied.net)
    else:
        size = len(pickle.dumps(copied.loss))
        copied.loss._lagrangian.warn = print
        copied.loss = (
            copy.deepcopy(copied.loss)
            if how == "deepcopy"
            else pickle.loads(pickle.dumps(copied.loss))
        )
        assert size < 20_000
    copied.optimizer = torch.optim.SGD(copied.net.parameters(), lr=0.05)
    for loop in (whole, copied):
        loop.train(3)
    assert (
        whole.loss._lagrangian.units.state_dict()
        == copied.loss._lagrangian.units.state_dict()
    )
    assert torch.equal(whole.loss.multipliers["fit"], copied.loss.multipliers["fit"])


def test_a_refused_state_changes_nothing() -> None:
    loop, other = Plain(), PointwiseLoss(BOUND, Pointwise(), samples=4)
    loop.train(2)
    before = pickle.dumps(other.state_dict())
    with pytest.raises(TrainingError, match="24 samples, this PointwiseLoss has 4"):
        other.load_state_dict(loop.loss.state_dict())
    assert pickle.dumps(other.state_dict()) == before
    grouped = PointwiseLoss(BOUND, Pointwise(), samples=6, groups=[0, 1, 2, 3, 4, 5])
    again = PointwiseLoss(BOUND, Pointwise(), samples=6, groups=[0, 1, 2, 3, 5, 4])
    with pytest.raises(TrainingError, match="another training set, order or groups"):
        again.load_state_dict(grouped.state_dict())
    state = loop.loss.state_dict()
    with pytest.raises(TrainingError, match=r"of step 8, the weights of step 7"):
        Plain().loss.load_state_dict(state, steps=7)
    one, two = Plain().loss, Plain().loss
    one.fingerprint, two.fingerprint = "rows", "rows in another order"
    with pytest.raises(TrainingError, match="another training set, order or groups"):
        two.load_state_dict(one.state_dict())


def test_weights_of_another_step_are_told() -> None:
    """As Accelerate's folder has them after a full disk: new weights beside λ of before."""
    loop = Plain(parameters="model")
    loop.train(2)
    state, weights = loop.loss.state_dict(), copy.deepcopy(loop.net.state_dict())
    loop.train(1)
    for given, told in ((weights, False), (copy.deepcopy(loop.net.state_dict()), True)):
        resumed = Plain(parameters="model")
        resumed.net.load_state_dict(given)
        resumed.loss.load_state_dict(state)
        resumed.train(1)
        assert [
            "not those that these multipliers" in each for each in resumed.said
        ] == [True] * told


# The window --------------------------------------------------------------------------------------


def test_a_forgotten_skip_and_accumulated_steps_are_noticed() -> None:
    for every in (2, 4):
        loop = Plain()
        for position, rows in enumerate(torch.arange(ROWS).split(2)):
            loop.of(rows).backward()
            if position % every == every - 1:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            loop.loss.step()
        assert ["no weight moved" in each for each in loop.said] == [True]


def test_a_dropped_loss_is_noticed() -> None:
    loop = Plain()
    loop.of(torch.arange(4))
    loop.step(torch.arange(4, 8))
    assert ["was not differentiated" in each for each in loop.said] == [True]
    loop = Plain()
    loop.of(torch.arange(4))
    loop.loss.skip()
    loop.step(torch.arange(4, 8))
    assert not loop.said
    assert not loop.loss.multipliers["fit"][:4].any()


def test_closures_have_losses_that_do_not_count() -> None:
    """LBFGS computes a batch again and again; λ takes one step, of where its step ended."""
    loop = Plain()
    loop.optimizer = torch.optim.LBFGS(loop.net.parameters(), lr=0.1)
    rows = torch.arange(ROWS)
    for step in range(6):

        def closure() -> float:
            loop.optimizer.zero_grad()
            loss = loop.of(rows, keep=False)
            loss.backward()
            return float(loss)

        loop.optimizer.step(closure)
        loop.of(rows).backward()
        loop.loss.step()
        assert loop.loss.steps == step + 1
        assert loop.loss.measured is not None
        assert len(loop.loss.measured.index) == ROWS
    assert loop.loss._rows == ROWS
    assert loop.loss.multipliers["fit"].any()
    assert not loop.said
    loop.of(rows)
    loop.of(rows)
    assert ["came twice since the last step" in each for each in loop.said] == [True]
    with pytest.raises(
        TrainingError, match=r"a closure \(LBFGS, SAM\) takes keep=False"
    ):
        loop.of(rows)


def test_micro_batches_with_other_counts_are_one_batch() -> None:
    rows, mask = (
        torch.arange(8),
        torch.tensor([1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool),
    )
    gradients = []
    for sizes in ([8], [4, 4], [3, 5]):
        loop = Plain(formulation=Pointwise(alpha=0.8, dual_lr=1.0))
        for part in rows.split(sizes):
            options: Any = {"masks": {"fit": mask[part]}}
            if len(sizes) > 1:
                options["counts"] = {"objective": 8, "fit": int(mask.sum())}
            loop.of(part, **options).backward()
        gradients.append([weight.grad.clone() for weight in loop.net.parameters()])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=0, atol=1e-6)


def test_a_state_within_a_step_is_that_of_before_it() -> None:
    loop = Plain()
    loop.train(1)
    before = loop.loss.state_dict()
    loop.of(torch.arange(4))
    # Measured at step 4.
    assert loop.loss._lagrangian.units.state_dict() != before["gradient_units"]
    assert loop.loss.state_dict()["gradient_units"] == before["gradient_units"]


# The graph ---------------------------------------------------------------------------------------


def train_by_sevens(loop: Plain) -> None:
    """Of which the last batch of an epoch is smaller."""
    for epoch in range(3):
        generator = torch.Generator().manual_seed(epoch)
        for rows in torch.randperm(ROWS, generator=generator).split(7):
            loop.step(rows)


SLOW = pytest.param("inductor", marks=pytest.mark.slow)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", SLOW])
def test_compiled_models_take_a_smaller_last_batch(backend: str) -> None:
    found = []
    for compiles in (False, True):
        loop = Plain(formulation=Pointwise())
        if compiles:
            loop.net = torch.compile(loop.net, backend=backend)
        train_by_sevens(loop)
        found.append(loop.loss.multipliers["fit"])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert found[0].any()


def test_a_graph_that_gave_its_buffers_away_is_told_in_one_sentence() -> None:
    import torch._functorch.config as options

    loop = Plain()
    torch._dynamo.reset()
    options.donated_buffer = True
    try:
        loop.net = torch.compile(loop.net, backend="aot_eager")
        with pytest.raises(
            TrainingError, match="Make the PointwiseLoss before the compiled model"
        ):
            train_by_sevens(loop)
    finally:
        options.donated_buffer = False
        torch._dynamo.reset()


# Several ranks -----------------------------------------------------------------------------------


@pytest.mark.slow  # Quick ones on two ranks are in test_door_table.py.
def test_two_ranks_are_one(tmp_path: Path) -> None:
    run_on_ranks(0, "tests.programs.doors", [str(tmp_path)], tmp_path)
    one, *two = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    refused = {
        "static graph": "Leave static_graph out",
        "half sharded": "trained weights are not sharded",
        "not averaged": "The weights differ between the ranks",
    }
    assert set(two[0]) == set(one)
    for name, expected in one.items():
        for found in two:
            if name in refused:
                assert refused[name] in found[name]
                continue
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-9)
            assert expected["multipliers"].any()
    torch.testing.assert_close(one["resumed"], one["plain"], rtol=0, atol=0)
