"""Saving and resuming: equal to the bit in mid-interval, float32 curvature under bf16 weights, safe loading."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fisherfold.optim import KFAC, MKFAC, SGDG


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(16 * width, 80, bias=False), nn.BatchNorm1d(80), nn.ReLU(), nn.Linear(80, 4),
    )  # fmt: skip


def run(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        x, y = torch.randn(24, 2, 4, 4, generator=generator), torch.randint(4, (24,), generator=generator)
        torch.manual_seed(step)
        with optimizer.statistics(enabled=step % 4 == 0 and optimizer.uses_curvature, invert=step % 8 == 0):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


OPTIONS: dict[str, tuple[type, dict[str, Any]]] = {
    "mkfac": (MKFAC, {"damping": 0.05, "max_rows": 64}),
    "kfac on all": (MKFAC, {"damping": 0.05, "euclidean": "kfac"}),
    "factored": (MKFAC, {"damping": 0.05, "damping_mode": "factored"}),
    "kfac": (KFAC, {"damping": 0.05}),
    "sgdg": (SGDG, {}),
    "balanced": (MKFAC, {"damping": 0.05, "balanced": True}),
    "capturable": (MKFAC, {"damping": 0.05, "capturable": True, "basis": 0.25}),
    "no factors kept": (MKFAC, {"damping": 0.05, "factor_decay": 0.0}),
}


@pytest.mark.parametrize("weights_first", [False, True])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_resume_in_mid_interval_is_equal_to_the_bit(name: str, weights_first: bool) -> None:
    """Whether the trained weights are loaded before the optimizer is made, which looks at their lengths, or after."""
    kind, options = OPTIONS[name]
    model = net()
    if kind is not KFAC:
        options = {**options, "example_input": torch.randn(8, 2, 4, 4)}
    optimizer = kind(model, lr=0.05, **options)
    run(model, optimizer, range(6))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    run(model, optimizer, range(6, 19))
    twin = net()
    if weights_first:
        twin.load_state_dict(saved["model"])
    resumed = kind(twin, lr=0.7, **options)
    if not weights_first:
        twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    run(twin, resumed, range(6, 19))
    for p, q in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert int(resumed._age) == int(optimizer._age)


def as_before_curvature_was_with_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it was once: only what has been stepped, and curvature and counters in one place alone."""
    started = {
        k for group in state["param_groups"] for k, s in zip(group["params"], group["started"], strict=True) if s
    }
    groups = [{k: v for k, v in group.items() if k not in ("counters", "started")} for group in state["param_groups"]]
    kept = {key: {"momentum_buffer": state["state"][key]["momentum_buffer"]} for key in started}
    return {**state, "state": kept, "param_groups": groups}


@pytest.mark.parametrize("steps", [0, 6])
def test_states_from_before_curvature_was_with_the_parameters_are_gone_on_from(steps: int) -> None:
    x, options = torch.randn(8, 2, 4, 4), {"damping": 0.05, "euclidean": "kfac"}
    models = net(), net()
    optimizers = [MKFAC(model, example_input=x, **options) for model in models]
    run(models[0], optimizers[0], range(steps))
    saved = as_before_curvature_was_with_parameters(optimizers[0].state_dict())
    assert len(saved["state"]) == (9 if steps else 2)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(through_a_file(saved))
    for model, optimizer in zip(models, optimizers, strict=True):
        run(model, optimizer, range(steps, steps + 4))
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, theirs)


def test_loading_shares_no_memory_with_the_saved_optimizer() -> None:
    model, twin = net(), net()
    x = torch.randn(8, 2, 4, 4)
    optimizer, other = (MKFAC(m, damping=0.05, example_input=x) for m in (model, twin))
    run(model, optimizer, range(2))
    other.load_state_dict(optimizer.state_dict())
    before = other.curvature.layers["0.weight"].a.clone()
    run(model, optimizer, range(4, 6))
    assert torch.equal(other.curvature.layers["0.weight"].a, before)


def test_factors_stay_float32_under_bf16_weights() -> None:
    """torch casts optimizer state to the dtype of the parameter on loading (pytorch#43706); curvature is exempt."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).to(torch.bfloat16)
    x, y = torch.randn(16, 5, dtype=torch.bfloat16), torch.randint(3, (16,))
    optimizer = MKFAC(model, damping=0.1, example_input=x)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    twin = MKFAC(model, damping=0.1, invariant={"0.weight": "row"})
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    ours, theirs = (o.curvature.layers["0.weight"] for o in (optimizer, twin))
    assert theirs.a.dtype == theirs.inverse.left.dtype == torch.float32
    assert torch.equal(ours.a, theirs.a)
    assert torch.equal(ours.inverse.right, theirs.inverse.right)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_curvature_serves_the_model_in_another_precision(before: torch.dtype, after: torch.dtype, loaded: bool) -> None:
    """Cast since, or loaded into: the same steps up to rounding, and a renewal in the precision of the weights."""
    x, y, found = torch.randn(32, 2, 4, 4).double(), torch.randint(4, (32,)), []
    for cast in (before, after):
        model = net().to(before).train()
        model[3].p = 0.0
        options = {"lr": 0.01, "manifold_lr": 0.01, "damping": 0.05, "euclidean": "kfac", "example_input": x.to(before)}
        optimizer = MKFAC(model, **options)
        optimizer.refresh([(x.to(before), y)], nn.CrossEntropyLoss())
        model.to(cast)
        if loaded:
            state, options["example_input"] = optimizer.state_dict(), x.to(cast)
            optimizer = MKFAC(model, **options)
            optimizer.load_state_dict(state)
        for step in range(3):
            with optimizer.statistics(enabled=step == 1):
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(cast)), y).backward()
            optimizer.step()
        found.append(torch.cat([p.detach().double().flatten() for p in model.parameters()]))
        layer = optimizer.curvature.layers["5.weight"]
        assert layer.a.dtype == layer.inverse.left.dtype == cast
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_schedules_in_numpy_leave_a_state_of_plain_numbers() -> None:
    """``torch.load`` takes no others without trusting the file."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = MKFAC(model, momentum=np.float32(0.5))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 * (1 + np.cos(epoch)))
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    schedule.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    (first, *_) = torch.load(file, weights_only=True)["param_groups"]
    assert type(first["lr"]) is type(first["momentum"]) is float
    assert (first["lr"], first["momentum"]) == (0.05 * 0.5 * (1 + math.cos(1)), 0.5)


def test_rows_without_a_direction_survive_a_checkpoint() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    with pytest.warns(UserWarning, match="stays Euclidean"):
        optimizer = MKFAC([{"params": [weight], "manifold": "row"}])
    state = through_a_file(optimizer.state_dict())
    with pytest.warns(UserWarning, match="stays Euclidean"):
        twin = MKFAC([{"params": [weight], "manifold": "row"}])
    twin.load_state_dict(state)
    weight.grad = torch.ones_like(weight)
    twin.step()
    assert float(weight.detach()[0].norm()) == pytest.approx(1.0)
    assert float(weight.detach()[1, 0]) == pytest.approx(-0.25)


def test_parameter_without_a_gradient_yet_survives_resume() -> None:
    model = net()
    model[8].weight.requires_grad_(False)
    optimizer = MKFAC(model, damping=0.1, example_input=torch.randn(8, 2, 4, 4))
    run(model, optimizer, range(2))
    twin_model = net()
    twin = MKFAC(twin_model, damping=0.1, example_input=torch.randn(8, 2, 4, 4))
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    run(twin_model, twin, range(2, 3))


def test_state_of_another_architecture_is_refused_and_nothing_changes() -> None:
    x = torch.randn(8, 2, 4, 4)
    optimizer = MKFAC(net(), damping=0.1, example_input=x)
    run(optimizer.model, optimizer, range(1))
    before = optimizer.state_dict()["curvature"]["0.weight"]["a"].clone()
    wide = MKFAC(net(7), damping=0.1, example_input=x).state_dict()
    with pytest.raises(
        ValueError, match=r"architecture: 0.weight has shape \(7, 2, 3, 3\) there, expected \(6, 2, 3, 3\)"
    ):
        optimizer.load_state_dict(wide)
    small = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    other = MKFAC(small, example_input=torch.randn(4, 3)).state_dict()
    with pytest.raises(ValueError, match=r"another architecture: groups of \[5, 1\] parameters, expected \[7, 2\]"):
        optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="the state has no curvature: it was not saved by MKFAC"):
        optimizer.load_state_dict(torch.optim.SGD(net().parameters()).state_dict())
    with pytest.raises(ValueError, match=r"only one of the two has curvature for 8.weight"):
        optimizer.load_state_dict(MKFAC(net(), damping=0.1, example_input=x, euclidean="kfac").state_dict())
    assert torch.equal(optimizer.curvature.layers["0.weight"].a, before)


def two_layers(kind: type, *, swapped: bool, named: bool = True) -> tuple[nn.Sequential, Any]:
    """Two weights of one shape, each in a group of its own; one of them on spheres under MKFAC."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8, bias=False))
    groups: list[dict[str, Any]] = [{"params": [model[0].weight]}, {"params": [model[2].weight], "lr": 0.02}]
    if kind is MKFAC:
        groups[0]["manifold"] = "row"
    order = groups[::-1] if swapped else groups
    return model, kind(order, model_of_groups=model if named else None, **({"damping": 0.1} if named else {}))


def train_two_layers(model: nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(8, (16,), generator=generator)
    for _ in range(steps):
        with optimizer.statistics():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [KFAC, MKFAC])
def test_groups_in_another_order_are_told_apart_by_the_names_in_their_module(kind: type) -> None:
    """Weights of one shape would get each other's curvature, momentum and manifold."""
    model, optimizer = two_layers(kind, swapped=False)
    train_two_layers(model, optimizer, 2)
    _, other = two_layers(kind, swapped=True)
    with pytest.raises(ValueError, match=r"in another order: it has .0.weight. where .2.weight. is expected"):
        other.load_state_dict(optimizer.state_dict())
    assert "0.weight" in optimizer.report()
    model[2].weight.grad[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"the gradient of 2.weight is not finite"):
        optimizer.step()


@pytest.mark.parametrize("kind", [KFAC, MKFAC])
def test_states_of_groups_from_before_they_had_names_are_gone_on_from(kind: type) -> None:
    model, optimizer = two_layers(kind, swapped=False)
    train_two_layers(model, optimizer, 2)
    saved = optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in saved["param_groups"]]
    places = {"0.weight": "group 0, parameter 0", "2.weight": "group 1, parameter 0"}
    old = {**saved, "param_groups": groups, "curvature": {places[k]: v for k, v in saved["curvature"].items()}}
    twin, resumed = two_layers(kind, swapped=False)
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(old))
    for net, going_on in ((model, optimizer), (twin, resumed)):
        train_two_layers(net, going_on, 3)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    if kind is MKFAC:
        with pytest.raises(ValueError, match=r"another order: 2.weight is on 0 spheres, .* there on 8"):
            two_layers(kind, swapped=True)[1].load_state_dict(old)


def test_manifolds_tell_groups_without_names_apart() -> None:
    saved = two_layers(MKFAC, swapped=False, named=False)[1].state_dict()
    with pytest.raises(ValueError, match=r"another order: group 0, parameter 0 is on 0 spheres, .* there on 8"):
        two_layers(MKFAC, swapped=True, named=False)[1].load_state_dict(saved)


@pytest.mark.parametrize("inverted", [True, False])
def test_curvature_of_another_size_is_refused_before_the_first_step(inverted: bool) -> None:
    """No momentum tells the sizes apart then."""
    narrow, wide = (KFAC(nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 3))) for n in (6, 8))
    with narrow.statistics(invert=inverted):
        F.cross_entropy(narrow.model(torch.randn(9, 4)), torch.randint(3, (9,))).backward()
    with pytest.raises(ValueError, match=r"the factors of 0.weight have orders \(6, 5\) there, expected \(8, 5\)"):
        wide.load_state_dict(narrow.state_dict())


def test_balanced_and_other_steps_do_not_take_over_each_others_state() -> None:
    x = torch.randn(8, 2, 4, 4)
    balanced, other = (MKFAC(net(), example_input=x, balanced=choice) for choice in (True, False))
    with pytest.raises(ValueError, match=r"saved with balanced=True, where .*, expected balanced=False"):
        other.load_state_dict(balanced.state_dict())
    with pytest.raises(ValueError, match=r"saved with balanced=False, where .*, expected balanced=True"):
        balanced.load_state_dict(other.state_dict())
    balanced.load_state_dict(balanced.state_dict())


def test_state_is_copied_when_it_is_loaded() -> None:
    """Two optimizers that share no tensor after loading: the first goes on without moving the second's momentum."""
    (first, other), x = (net(), net()), torch.randn(8, 2, 4, 4)
    optimizer, resumed = (MKFAC(m, damping=0.05, balanced=True, example_input=x) for m in (first, other))
    run(first, optimizer, range(3))
    other.load_state_dict(first.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    run(first, optimizer, range(3, 6))
    run(other, resumed, range(3, 6))
    for mine, theirs in zip(first.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
