"""What goes wrong, and what is said about it: bad input at the door, non-finite numbers, failing solvers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from fisherfold.optim import KFAC, MKFAC, SGDG, SGDP, AdamP
from fisherfold.optim import curvature as curvature_module
from fisherfold.optim.spectral import FactorError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 5, generator=generator), torch.randint(3, (16,), generator=generator)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"lr must be in \[0, inf\), got -0.1"),
        ({"manifold_lr": -1.0}, r"manifold_lr must be in \[0, inf\), got -1"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1"),
        ({"weight_decay": -1e-4}, r"weight_decay must be in \[0, inf\), got -0.0001"),
        ({"damping": 0.0}, r"damping must be in \(0, inf\), got 0"),
        ({"damping": float("nan")}, r"damping must be in \(0, inf\), got nan"),
        ({"lr": float("inf")}, r"lr must be in \[0, inf\), got inf"),
        ({"weight_decay": float("inf")}, r"weight_decay must be in \[0, inf\), got inf"),
        ({"damping": float("inf")}, r"damping must be in \(0, inf\), got inf"),
        ({"factor_decay": 1.0}, r"factor_decay must be in \[0, 1\), got 1"),
        ({"max_angle": 0.0}, r"max_angle must be in \(0, 3.14159\], got 0"),
        ({"clip": 0.0}, r"clip must be in \(0, inf\), got 0"),
        ({"orthogonality": -0.1}, r"orthogonality must be in \[0, inf\), got -0.1"),
        ({"max_rows": 0}, "max_rows must be a whole number above 0, or None, got 0"),
        ({"max_rows": 2.5}, "max_rows must be a whole number above 0, or None, got 2.5"),
        ({"basis": "half"}, "basis must be one of 'auto', 'full', got 'half'"),
        ({"basis": 1.5}, r"basis must be in \(0, 1\], got 1.5"),
        ({"fisher": "true"}, "fisher must be one of 'empirical', 'mc', 'persample', got 'true'"),
        ({"retraction": "qr"}, "retraction must be one of 'exp', 'normalize', got 'qr'"),
        ({"reduction": "none"}, "reduction must be one of 'mean', 'sum', got 'none'"),
        ({"invariant": "guess"}, "invariant must be one of 'probe', 'modules', 'none', got 'guess'"),
        ({"invariant": "probe"}, "invariant='probe' needs example_input"),
        ({"invariant": {"9.weight": "row"}}, "invariant names '9.weight', which is no parameter of Sequential"),
        ({"invariant": {"0.bias": "row"}}, r"0.bias has shape \(6,\): only weights with rows"),
        ({"invariant": {"0.weight": 4}}, "0.weight has 6 rows, which cannot be cut into 4 spheres"),
        ({"example_input": torch.zeros(4, 9)}, r"example_input \(shapes \[\(4, 9\)\]\) was rejected by Sequential"),
        ({"example_input": torch.zeros(0, 5)}, r"example_input \(shapes \[\(0, 5\)\]\) has no samples: Sequential"),
        ({"example_input": torch.full((4, 5), torch.nan)}, "Sequential returned NaN for example_input: look for"),
    ],
)
def test_bad_options_are_named_and_the_model_is_left_as_it_was(options: dict[str, Any], message: str) -> None:
    model = net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        MKFAC(model, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "0.05"}, "lr must be a number, got '0.05'"),
        ({"manifold_lr": None}, "manifold_lr must be a number, got None"),
        ({"momentum": "much"}, "momentum must be a number, got 'much'"),
        ({"damping": torch.ones(2)}, r"damping must be a number, got tensor\(\[1., 1.\]\)"),
        ({"max_angle": 1j}, "max_angle must be a number, got 1j"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
    ],
)
def test_options_that_are_no_numbers_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MKFAC(net(), **options)


def test_parameters_that_have_no_values_yet_are_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(6), nn.BatchNorm1d(6))
    for options in ({}, {"example_input": batch()[0]}):
        with pytest.raises(ValueError, match=r"0.weight has no shape yet: call the model on a batch first"):
            MKFAC(lazy, **options)
    with pytest.raises(ValueError, match="a parameter has no shape yet"):
        MKFAC([{"params": lazy[0].weight, "manifold": "row"}])
    with torch.device("meta"):
        nowhere = net()
    with pytest.raises(ValueError, match=r"0.weight is on the meta device and has no values: load the model first"):
        MKFAC(nowhere)


@pytest.mark.filterwarnings("ignore:parameters alone are moved by SGD")
def test_what_is_no_parameter_is_refused() -> None:
    for given, kind in ((["weights"], "str"), ({"params": net().parameters()}, "str"), ([{"params": [1.0]}], "float")):
        with pytest.raises(TypeError, match=f"a parameter group must hold parameters, got a {kind} among them"):
            MKFAC(given)
    with pytest.raises(ValueError, match="a parameter group must have at least one parameter, got none"):
        MKFAC([{"manifold": "row"}])


def test_nothing_to_optimise() -> None:
    with pytest.raises(ValueError, match="model must have parameters, ReLU has none"):
        MKFAC(nn.ReLU())
    with pytest.raises(ValueError, match="at least one parameter, got nothing"):
        MKFAC([])
    with pytest.raises(ValueError, match="a parameter group must have at least one parameter"):
        MKFAC([{"params": [], "manifold": "none"}])


def test_weight_decay_on_the_sphere_is_refused() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"weight_decay must be 0 for a group on spheres.*got 0.1"):
        MKFAC([{"params": [weight], "manifold": "row", "weight_decay": 0.1}])
    optimizer = MKFAC([{"params": [weight], "manifold": "none"}], weight_decay=0.1)
    group = {"params": [nn.Parameter(torch.randn(2, 2))], "manifold": "tensor"}
    with pytest.raises(ValueError, match="weight_decay must be 0 for a group on spheres"):
        optimizer.add_param_group({**group, "weight_decay": 1e-3})
    optimizer.add_param_group(group)  # what was refused is not there
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 1]


def test_weight_decay_that_a_schedule_sets_on_the_sphere_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = SGDG(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in net.parameters()]
    for group in optimizer.param_groups:
        group["weight_decay"] = 1e-2
    with pytest.raises(ValueError, match=r"weight_decay must be 0 for a group on spheres.*got 0.01"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", [MKFAC, SGDG, KFAC, SGDP, AdamP])
def test_entries_of_groups_that_would_do_nothing_are_refused(kind: Any) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    refused = ["maximize"] if kind in (SGDP, AdamP) else ["maximize", "nesterov", "dampening"]
    for name in refused:
        with pytest.raises(ValueError, match=f"a parameter group cannot have {name} here, got {name}=True"):
            kind([{"params": [weight], "manifold": "none", name: True}], lr=0.1)
    given = torch.optim.SGD([{"params": [weight], "manifold": "none"}], lr=0.1).param_groups[0]
    kind([given])  # says that it wants none of them


def test_eval_mode_at_refresh() -> None:
    model = net()
    x, y = batch()
    optimizer = MKFAC(model, example_input=x)
    model.eval()
    with pytest.raises(ValueError, match="batch norm '1' is in eval mode"):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="batch norm '1' is in eval mode"), optimizer.statistics():
        pass
    KFAC(model).refresh([(x, y)], nn.CrossEntropyLoss())  # without spheres there is nothing to break


@pytest.mark.parametrize("kind", [SGDG, MKFAC])
def test_lengths_that_matter_are_a_warning(kind: type[MKFAC]) -> None:
    """Behind a frozen norm in evaluation mode rows are not invariant; steps say so, once, by what gradients show."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 8, 8), torch.randint(3, (64,))
    first, last = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    convolutions = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3)
    net = nn.Sequential(convolutions[0], first, nn.ReLU(), convolutions[1], last, nn.Flatten(), nn.Linear(128, 3))
    opt = kind(net, lr=0.01, manifold_lr=0.01, example_input=x)

    def step(*modes: bool, judged: bool = False) -> None:
        for norm, mode in zip((first, last), modes, strict=True):
            norm.train(mode)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if judged:
            net.eval()
        opt.step()
        net.train()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(True, True)
        step(True, True, judged=True)  # the gradient is that of training
        net[0].weight.requires_grad_(False)
        step(False, True)  # nothing that is trained is before it
    with pytest.warns(UserWarning, match=r"^3.weight is kept at unit length, .* length matters: batch norm '4' is in"):
        step(False, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(False, False)


@pytest.mark.parametrize(("declared", "actual"), [("mean", "sum"), ("sum", "mean")])
def test_loss_that_is_not_reduced_as_declared(declared: str, actual: str) -> None:
    x, y = batch()
    optimizer = MKFAC(net(), example_input=x, reduction=declared)
    with pytest.raises(ValueError, match=f"not reduced as declared: with reduction='{declared}'"):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss(reduction=actual))
    with pytest.raises(ValueError, match=r"loss_fn must return one number, reduced over the batch, got \(16,\)"):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss(reduction="none"))


def test_refresh_that_collects_nothing() -> None:
    model = net()
    x, y = batch()
    optimizer = MKFAC(model, example_input=x)
    with pytest.raises(RuntimeError, match="no curvature was collected"), optimizer.statistics():
        model(x)
    with pytest.raises(RuntimeError, match="no curvature was collected"), optimizer.statistics():
        F.cross_entropy(net()(x), y).backward()
    for given, loss_fn, said in (
        (iter([]), nn.CrossEntropyLoss(), "batches is empty"),
        (None, nn.CrossEntropyLoss(), r"batches must be pairs of inputs and targets.*, got None"),
        ([batch()], nn.CrossEntropyLoss, r"such as CrossEntropyLoss\(\), got the class"),
        ([batch()], "cross_entropy", "loss_fn must be a function of outputs and targets, got 'cross_entropy'"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            optimizer.refresh(given, loss_fn)
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("fisher", ["empirical", "persample"])
def test_refresh_takes_pairs_alone(fisher: str) -> None:
    """Two samples are no inputs and targets, nor are two keys."""
    model = net()
    x, y = batch()
    optimizer = MKFAC(model, example_input=x, fisher=fisher)
    for given in ((x[:2], y[:2]), [x], [{"inputs": x, "targets": y}], [(x, y, y)]):
        with pytest.raises(TypeError, match=r"batches must hold pairs of inputs and targets.*, got a \w+ of size"):
            optimizer.refresh(given, nn.CrossEntropyLoss())
    assert all(not module._forward_hooks for module in model.modules())


def test_hooks_are_removed_when_the_loss_fails() -> None:
    model = net()
    x, y = batch()
    optimizer = MKFAC(model, example_input=x)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the user's loss")

    with pytest.raises(ZeroDivisionError, match="in the user's loss"):
        optimizer.refresh([(x, y)], broken)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_monte_carlo_needs_a_known_likelihood() -> None:
    x, y = batch()
    optimizer = MKFAC(net(), example_input=x, fisher="mc")

    def hinge(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.multi_margin_loss(z, t)

    with pytest.raises(ValueError, match=r"fisher='mc' has to draw targets.*hinge.*pass sampler="):
        optimizer.refresh([(x, y)], hinge)
    optimizer.refresh([(x, y)], hinge, sampler=lambda z, t, g: t)


@pytest.mark.parametrize("kind", [MKFAC, SGDP, AdamP])
def test_non_finite_gradient_changes_nothing(kind: type) -> None:
    model = net()
    x, y = batch()
    optimizer = MKFAC(model, example_input=x) if kind is MKFAC else kind(model.named_parameters(), lr=0.1)
    F.cross_entropy(model(x), y).backward()
    model[3].weight.grad[0, 0] = float("nan")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(FloatingPointError, match=r"the gradient of 3.weight is not finite; no parameter was changed"):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert kind is MKFAC or not optimizer.state


def test_non_finite_factors_keep_the_last_inverse_and_raise_the_third_time() -> None:
    model = net()
    x, y = batch()
    optimizer = MKFAC(model, example_input=x, damping=0.1)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    layer = optimizer.curvature.layers["0.weight"]
    kept = layer.inverse.left.clone()
    poisoned = x.clone()
    poisoned[0, 0] = float("inf")
    for count in (1, 2):
        with optimizer.statistics():
            F.cross_entropy(model(poisoned), y).backward()
        assert layer.failures == count
        torch.testing.assert_close(layer.inverse.left, kept)
        assert bool(torch.isfinite(layer.a).all())
    with (
        pytest.raises(FactorError, match=r"0.weight: its factors are not finite, 3 times in a row"),
        optimizer.statistics(),
    ):
        F.cross_entropy(model(poisoned), y).backward()


def test_failing_factorisations_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    x, y = batch()
    optimizer = MKFAC(model, example_input=x, damping=0.1)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    layer = optimizer.curvature.layers["0.weight"]
    kept = layer.inverse

    def fail(*_: Any, **__: Any) -> None:
        raise FactorError("no eigendecomposition of A of 0.weight (order 5) succeeded")

    monkeypatch.setattr(curvature_module, "exact", fail)
    for count in (1, 2):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
        assert layer.failures == count
        assert layer.inverse is kept
    with pytest.raises(FactorError, match=r"0.weight: no eigendecomposition of A .* 3 times in a row"):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    monkeypatch.undo()
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    assert layer.failures == 0


def test_refresh_without_anything_to_track_does_nothing() -> None:
    """SGDG keeps no curvature, and a network without norms has none for MKFAC: one loop for all of them."""
    x, y = batch()
    for optimizer in (SGDG(net(), example_input=x), MKFAC(nn.Linear(5, 3), invariant="none")):
        for fisher in ("empirical", "mc", "persample"):
            optimizer.refresh([(x, y)], nn.CrossEntropyLoss(), fisher=fisher)
        assert optimizer.curvature.layers == {}


def test_a_network_without_scale_invariant_weights_is_a_warning() -> None:
    """SGD under another name is no surprise to those who asked for it, nor is it SGD where there is curvature."""
    x, _ = batch()
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.warns(UserWarning, match=r"of Sequential .*\(report\(\) says why\): MKFAC moves all of it by SGD"):
        MKFAC(model, example_input=x)
    with pytest.warns(UserWarning, match=r"\(guessed from its modules, of which example_input .*\): SGDG moves all"):
        SGDG(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MKFAC(model, invariant="none")
        MKFAC(model, invariant={"0.weight": "none"})
        MKFAC(model, example_input=x, euclidean="kfac")
        KFAC(model)
        MKFAC(net())


def test_per_sample_gradients_need_samples_that_can_be_taken_apart() -> None:
    x, y = batch()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.body(x)}

    with pytest.raises(TypeError, match="outputs must be a tensor with one entry or row per sample, got a dict: take"):
        KFAC(Wrapped()).refresh([(x, y)], lambda z, t: F.cross_entropy(z["logits"], t), fisher="persample")
    with pytest.raises(TypeError, match=r"targets must be a tensor .*, got a tuple"):
        KFAC(net()).refresh([(x, (y, y))], lambda z, t: F.cross_entropy(z, t[0]), fisher="persample")
    with pytest.raises(TypeError, match=r"targets must be a tensor .*, got a number"):
        KFAC(net()).refresh([(x, torch.tensor(1.0))], lambda z, t: (z - t).square().mean(), fisher="persample")


def test_sampler_sees_outputs_that_are_no_tensor() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.body(x)}

    x, y = batch()
    optimizer = MKFAC(Named(), example_input=x, fisher="mc", damping=0.1)
    seen: list[set[str]] = []

    def draw(outputs: Any, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seen.append(set(outputs))
        return torch.randint(3, targets.shape, generator=generator)

    optimizer.refresh([(x, y)], lambda outputs, t: F.cross_entropy(outputs["logits"], t), sampler=draw)
    assert seen == [{"logits"}]
    assert optimizer.curvature.layers["body.0.weight"].inverse is not None


def test_sparse_gradients_step_like_dense_ones() -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(9, 5, sparse=sparse), nn.Flatten(), nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        )
        ids = torch.randint(9, (16, 2))
        optimizer = MKFAC(model, lr=0.1, example_input=ids)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(ids), batch()[1]).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    for dense, other in zip(*ends, strict=True):
        torch.testing.assert_close(other, dense)


def test_default_device_does_not_matter() -> None:
    """The random numbers of the probe are drawn on the CPU, by a generator that belongs there."""
    model = net()
    x, y = batch()
    with torch.device("meta"):
        optimizer = MKFAC(model, example_input=x, damping=0.1, balanced=True)
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert optimizer.findings["0.weight"].kind == "row"


def test_group_without_names_joins_groups_with_names() -> None:
    model = net()
    x, y = batch()
    optimizer = SGDG(model, lr=0.1, example_input=x)
    extra = nn.Linear(3, 3, bias=False)
    optimizer.add_param_group({"params": [extra.weight], "manifold": "row"})
    F.cross_entropy(extra(model(x)), y).backward()
    optimizer.step()
    torch.testing.assert_close(extra.weight.norm(dim=1), torch.ones(3))
    assert "group 2, parameter 0  3×3    3 spheres in R^3" in optimizer.report()


def test_sharded_parameters_are_refused() -> None:
    class FlatParameter(nn.Parameter):
        pass

    with pytest.raises(ValueError, match=r"parameters sharded by FSDP are not supported.*use DistributedDataParallel"):
        MKFAC([{"params": [FlatParameter(torch.randn(6))], "manifold": "none"}])

    class Sharded(nn.Linear):  # as fully_shard makes them
        def __deepcopy__(self, _memo: Any) -> Any:
            raise AssertionError("FSDP does not support deepcopy")

    sharded = Sharded(3, 3)
    sharded.weight = FlatParameter(torch.randn(3, 3))
    with pytest.raises(ValueError, match=r"sharded by FSDP are not supported \(got a FlatParameter of shape \(3, 3\)"):
        MKFAC(sharded, example_input=torch.randn(4, 3))

    class FullyShardedDataParallel(nn.Sequential):  # with use_orig_params=True
        pass

    wrapped = nn.Sequential(nn.Linear(3, 3), FullyShardedDataParallel(nn.Linear(3, 2)))
    for kind in (MKFAC, KFAC, SGDG):
        with pytest.raises(ValueError, match=r"sharded by FSDP are not supported \(it wraps 1\): use Distributed"):
            kind(wrapped)


@pytest.mark.parametrize("kind", [SGDP, AdamP])
def test_rivals_check_their_numbers(kind: type) -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    with pytest.raises(ValueError, match="lr must be in"):
        kind([weight], lr=-1.0)
    with pytest.raises(ValueError, match="weight_decay must be in"):
        kind([weight], weight_decay=-1.0)
    for name in ("delta", "eps", "wd_ratio"):
        with pytest.raises(ValueError, match=f"{name} must be in"):
            kind([weight], **{name: -1.0})
    with pytest.raises(TypeError, match=r"lr must be a number, got '0.1'"):
        kind([weight], lr="0.1")
    for betas in ((0.9,), (0.9, 0.99, 0.999), 0.9):
        with pytest.raises(ValueError, match="betas must be two numbers, got "):
            AdamP([weight], betas=betas)


@pytest.mark.parametrize(
    ("kind", "entry", "message"),
    [
        (SGDP, {"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1"),
        (SGDP, {"dampening": 2.0}, r"dampening must be in \[0, 1\], got 2"),
        (SGDP, {"weight_decay": -1.0}, "weight_decay must be in"),
        (AdamP, {"betas": (1.5, 0.9)}, r"betas must be in \[0, 1\), got 1.5"),
        (AdamP, {"betas": 0.9}, "betas must be two numbers, got 0.9"),
        (AdamP, {"lr": -1.0}, "lr must be in"),
    ],
)
def test_rivals_check_the_numbers_of_groups(kind: type, entry: dict[str, Any], message: str) -> None:
    weight, other = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
    with pytest.raises(ValueError, match=message):
        kind([{"params": [weight], **entry}])
    optimizer = kind([weight])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [other], **entry})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [SGDP, AdamP])
def test_rivals_accept_weights_without_rows(kind: type) -> None:
    weight = nn.Parameter(torch.ones(0, 3))
    weight.grad = torch.ones(0, 3)
    kind([weight], lr=0.1).step()


def test_complex_weights_have_no_curvature_no_spheres_and_no_projection() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3, dtype=torch.complex64)
    x = torch.randn(10, 4, dtype=torch.complex64)
    opt, before = KFAC(net, lr=0.1), net.weight.detach().clone()
    assert opt.refused == {"weight": "first order: its numbers are complex"}
    net(x).abs().square().mean().backward()
    assert net.weight.grad is not None
    opt.step()
    torch.testing.assert_close(net.weight.detach(), before - 0.1 * net.weight.grad)
    with pytest.raises(ValueError, match="only real weights can be put on spheres"):
        MKFAC([{"params": [net.weight], "manifold": "row"}])
    for rival in (SGDP, AdamP):
        with pytest.raises(ValueError, match=f"{rival.__name__} is for real parameters"):
            rival(net.parameters())


def test_one_target_for_a_whole_batch_is_no_error() -> None:
    """As of the critic of two networks, whose samples are all real or all not."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 1), torch.randn(8, 4)
    opt, each = KFAC(net), KFAC(net)
    loss_fn = lambda z, y: F.binary_cross_entropy_with_logits(z, y.expand_as(z))  # noqa: E731
    opt.refresh([(x, torch.tensor(1.0))], loss_fn)
    each.refresh([(x, torch.ones(8, 1))], loss_fn)
    assert torch.equal(opt.curvature.layers["weight"].a, each.curvature.layers["weight"].a)


@pytest.mark.parametrize("damping", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("mode", ["exact", "factored"])
def test_a_damping_that_a_schedule_has_spoilt_is_refused(damping: float, mode: str) -> None:
    torch.manual_seed(0)
    opt = KFAC(nn.Linear(4, 3), damping_mode=mode)
    batch = (torch.randn(8, 4), torch.randint(3, (8,)))
    opt.refresh([batch], nn.CrossEntropyLoss())
    before = opt.curvature.layers["weight"].inverse
    opt.param_groups[0]["damping"] = damping
    with pytest.raises(ValueError, match=rf"damping must be in \(0, inf\), got {damping:g}"):
        opt.refresh([batch], nn.CrossEntropyLoss())
    assert opt.curvature.layers["weight"].inverse is before


def test_a_loss_that_is_not_finite_is_no_matter_of_its_reduction() -> None:
    model, (x, y) = net(), batch()
    optimizer = MKFAC(model)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    inverse = optimizer.curvature.layers["0.weight"].inverse
    wrong = x.clone()
    wrong[0, 0] = torch.inf
    for _ in range(2):
        optimizer.refresh([(wrong, y)], nn.CrossEntropyLoss())
        assert optimizer.curvature.layers["0.weight"].inverse is inverse
    with pytest.raises(FactorError, match=r"0.weight: its factors are not finite, 3 times in a row"):
        optimizer.refresh([(wrong, y)], nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"a batch must have samples, got outputs of shape \(0, 3\)"):
        optimizer.refresh([(x[:0], y[:0])], nn.CrossEntropyLoss())


def test_parameters_that_have_been_replaced_are_named() -> None:
    """Their steps would lead nowhere: the optimizer holds those that were there before."""
    model, (x, y) = net(), batch()
    optimizer = MKFAC(model)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    message = "0.weight is no longer the parameter that the optimizer was given.*make a new optimizer"
    with pytest.raises(RuntimeError, match=message):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    with pytest.raises(RuntimeError, match=message), optimizer.statistics():
        F.cross_entropy(model(x), y).backward()
    other = net()
    optimizer = MKFAC(other)
    prune.identity(other[0], "weight")  # the parameter is there, under another name
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    prune.remove(other[0], "weight")
    optimizer = MKFAC(other)
    parametrizations.weight_norm(other[0])
    with pytest.raises(RuntimeError, match=message):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())


def test_layers_that_have_been_replaced_are_named_until_they_are_handed_over() -> None:
    """Another head for other classes, put there after the optimizer was made, is the one that is to learn."""
    model, (x, y) = net(), batch()
    optimizer = KFAC(model, lr=0.01)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    last = len(model) - 1
    old, new = model[last], nn.Linear(model[last].in_features, model[last].out_features + 2)
    model[last] = new
    with pytest.raises(RuntimeError, match=f"{last}.weight is no longer the parameter.*hand it a new layer with add_p"):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    optimizer.add_param_group({"params": new.parameters()})
    before = [layer.weight.clone() for layer in (old, new)]
    with optimizer.statistics():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert [torch.equal(w, layer.weight) for w, layer in zip(before, (old, new), strict=True)] == [True, False]
    assert optimizer.diagnostics()[f"{last}.weight"].cosine < 1
    del model[last]  # a layer that is taken away is not replaced
    optimizer.refresh([(x, y % model(x).shape[1])], nn.CrossEntropyLoss())


def test_scripted_parts_are_trained_and_the_probe_says_what_it_cannot_do() -> None:
    """A copy of a scripted module runs the original; without the probe it is a part without curvature."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripts are deprecated
        part = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()))
    net = nn.Sequential(part, nn.Linear(8, 3))
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with pytest.raises(ValueError, match="cannot be copied for the probe: its copy runs parts of the original"):
        MKFAC(net, example_input=x)
    optimizer = MKFAC(net, invariant="modules", euclidean="kfac")
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert optimizer.curvature.layers["1.weight"].inverse is not None


@pytest.mark.parametrize("fisher", ["empirical", "mc", "persample"])
def test_batches_without_a_target_say_nothing(fisher: str) -> None:
    """A gradient of zero for want of targets is no flat loss: directions would grow by 1/λ."""
    (x, y), loss_fn, model = batch(), nn.CrossEntropyLoss(), net()
    ignored = torch.full_like(y, -100)
    optimizer = MKFAC(model, damping=1e-3, fisher=fisher, example_input=x)
    layer = optimizer.curvature.layers["0.weight"]
    with pytest.warns(UserWarning, match="all targets are ignored by the loss: no curvature was taken from them"):
        optimizer.refresh([(x, ignored), (x, ignored)], loss_fn)
    assert layer.inverse is None
    optimizer.refresh([(x, y)], loss_fn, fisher="empirical" if fisher == "mc" else fisher)
    a, g = layer.a.clone(), layer.g.clone()
    optimizer.refresh([(x, ignored), (x, y)], loss_fn, fisher="empirical" if fisher == "mc" else fisher)
    assert torch.equal(layer.a, a)
    assert torch.equal(layer.g, g)


def test_a_loss_without_a_gradient_is_refused() -> None:
    x, y = batch()
    optimizer = MKFAC(net(), example_input=x)
    with pytest.raises(ValueError, match="loss_fn must return a number that depends on what the model computed"):
        optimizer.refresh([(x, y)], lambda outputs, targets: F.cross_entropy(outputs.detach(), targets))
