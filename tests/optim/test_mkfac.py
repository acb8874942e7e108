"""MKFAC as an optimizer: its direction, its geometry, the habits of torch.optim, and what it works with."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import SUITE, build
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fisherfold
from fisherfold.manifolds import Oblique
from fisherfold.optim import KFAC, MKFAC, SGDG
from fisherfold.optim.curvature import CurvatureOptions
from fisherfold.optim.replica import call


def bn_net(*, inplace: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace), nn.Conv2d(6, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8), nn.ReLU(inplace), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def data(n: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 6, 6, generator=generator), torch.randint(4, (n,), generator=generator)


def train(model: nn.Module, optimizer: Any, steps: int, *, refresh: int = 4) -> list[float]:
    x, y = data()
    losses = []
    for step in range(steps):
        with optimizer.statistics(enabled=step % refresh == 0):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_public_names() -> None:
    assert fisherfold.MKFAC is MKFAC
    assert {"MKFAC", "KFAC", "SGDG", "SGDP", "AdamP", "find_scale_invariant"} <= set(fisherfold.__all__)


def test_one_step_is_precondition_project_retract() -> None:
    """Against the formula in float64 with the dense Kronecker matrix and the manifold's own operations."""
    model = bn_net().double()
    x, y = data()
    x = x.double()
    optimizer = MKFAC(model, lr=0.1, manifold_lr=0.3, momentum=0.9, damping=0.2, example_input=x, basis="full")
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    weight = model[3].weight
    layer = optimizer.curvature.layers["3.weight"]
    w = weight.detach().reshape(8, -1).clone()
    momentum = torch.zeros_like(w)
    oblique = Oblique(8, 54)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        system = torch.kron(layer.g, layer.a) + 0.2 * torch.eye(8 * 54, dtype=torch.float64)
        v = torch.linalg.solve(system, weight.grad.flatten()).reshape(8, 54)
        momentum = 0.9 * momentum + oblique.project(w, v)
        target = oblique.exp(w, -0.3 * momentum)
        momentum = oblique.transport(w, target, momentum, method="parallel")
        w = target
        optimizer.step()
        torch.testing.assert_close(weight.detach().reshape(8, -1), w)
        torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"].reshape(8, -1), momentum)


def test_function_is_unchanged_by_the_constructor() -> None:
    for name in ("conv-bn", "conv-gn-groups", "linear-ln", "weight-norm", "dense-concatenation"):
        net, example, _ = build(name)
        net = net.double()
        before = net(example.double()).detach()
        optimizer = MKFAC(net, example_input=example)
        assert any(group["manifold"] == "spheres" for group in optimizer.param_groups)
        torch.testing.assert_close(net(example.double()).detach(), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [n for n in SUITE if n not in ("vgg16-bn", "wrn-16-4")])
def test_every_architecture_trains_and_stays_on_its_spheres(name: str) -> None:
    """All parameters with a gradient move, and preconditioned directions are tangent to 1e-6."""
    net, example, _ = build(name)
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.02, damping=0.5, example_input=example, euclidean="kfac")
    start = {key: p.detach().clone() for key, p in net.named_parameters()}
    moved = set()
    for _ in range(3):
        with optimizer.statistics():
            optimizer.zero_grad()
            outputs = call(net, example)
            parts = (
                outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else [outputs]
            )
            sum(p.square().mean() for p in parts).backward()
        clone = copy.deepcopy({key: p.grad for key, p in net.named_parameters()})
        optimizer.precondition_()
        for parameter, _, spheres in optimizer._entries():
            if spheres and parameter.grad is not None:
                w, v = parameter.detach().reshape(spheres, -1), parameter.grad.reshape(spheres, -1)
                radial = (w * v).sum(dim=1).norm() / v.norm().clamp_min(1e-20)
                assert float(radial) < 1e-6
        for key, parameter in net.named_parameters():
            parameter.grad = clone[key]
        optimizer.step()
        moved |= {key for key, p in net.named_parameters() if not torch.equal(p.detach(), start[key])}
    with_gradient = {key for key, p in net.named_parameters() if p.grad is not None and bool(p.grad.abs().max() > 1e-7)}
    assert with_gradient <= moved
    for parameter, _, spheres in optimizer._entries():
        if spheres and parameter.grad is not None:
            assert float((parameter.detach().reshape(spheres, -1).norm(dim=1) - 1).abs().max()) < 1e-6


def test_huge_damping_is_riemannian_sgd() -> None:
    """λ → ∞ with η_g/λ fixed: MKFAC and SGDG walk the same path, and the diagnostics say so."""
    curved, plain = bn_net().double(), bn_net().double()
    x, y = data()
    x = x.double()
    mkfac = MKFAC(curved, lr=0.1, manifold_lr=0.2e9, damping=1e9, example_input=x)
    sgdg = SGDG(plain, lr=0.1, manifold_lr=0.2, example_input=x)
    mkfac.refresh([(x, y)], nn.CrossEntropyLoss())
    for _ in range(4):
        for model, optimizer in ((curved, mkfac), (plain, sgdg)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for p, q in zip(curved.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert all(d.cosine > 1 - 1e-9 and d.top < 1e-6 for d in mkfac.diagnostics().values())


def test_small_damping_bends_the_direction_and_diagnostics_show_it() -> None:
    model = bn_net()
    x, y = data()
    optimizer = MKFAC(model, damping=1e-3, example_input=x)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    F.cross_entropy(model(x), y).backward()
    found = optimizer.diagnostics()
    assert set(found) == {"0.weight", "3.weight"}
    assert all(d.cosine < 0.97 and d.top > 10 and d.gradient_radial < 1e-3 and d.age == 0 for d in found.values())
    assert max(d.radial for d in found.values()) > 1e-3  # which is why the direction is projected
    optimizer.step()
    assert all(d.age == 1 for d in optimizer.diagnostics().values())


def test_report_says_what_is_treated_how_and_why() -> None:
    net, example, _ = build("weight-norm")
    text = MKFAC(net, example_input=example).report()
    assert "6 spheres in R^5" in text
    alone = MKFAC(nn.Linear(2, 1, bias=False), invariant={"weight": "row"}).report()
    assert "1 sphere in R^2" in alone
    assert "Euler's identity holds" in text
    assert "first order: a parameter of ParametrizationList" in text
    assert text.splitlines()[-1].endswith("MiB")
    guessed = MKFAC(bn_net()).report()
    assert "guess: all its uses are batch or instance norms" in guessed


def test_bias_before_batch_norm_is_kept_out_of_the_factor() -> None:
    model = bn_net()
    x, _ = data()
    optimizer = MKFAC(model, example_input=x)
    assert optimizer.curvature.layers["0.weight"].tracked.bias is None
    assert optimizer.curvature.layers["0.weight"].tracked.sizes == (6, 18)
    kfac = KFAC(bn_net())
    assert kfac.curvature.layers["0.weight"].tracked.sizes == (6, 19)


def test_kfac_step_includes_the_bias() -> None:
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,))
    optimizer = KFAC(model, lr=0.5, momentum=0.0, damping=0.1)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    F.cross_entropy(model(x), y).backward()
    joined = torch.cat([model.weight, model.bias[:, None]], dim=1).detach()
    gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], dim=1)
    layer = optimizer.curvature.layers["weight"]
    system = torch.kron(layer.g, layer.a) + 0.1 * torch.eye(15, dtype=torch.float64)
    expected = joined - 0.5 * torch.linalg.solve(system, gradient.flatten()).reshape(3, 5)
    optimizer.step()
    torch.testing.assert_close(torch.cat([model.weight, model.bias[:, None]], dim=1).detach(), expected)


@pytest.mark.parametrize(
    "option",
    [
        {"manifold_lr": 0.1},
        {"retraction": "normalize"},
        {"max_angle": 0.1},
        {"clip": 0.1},
        {"orthogonality": 0.1},
        {"balanced": True},
        {"fuse": True},
        {"invariant": "modules"},
        {"example_input": torch.ones(2, 4)},
        {"euclidean": "sgd"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_kfac_has_no_options_for_spheres(option: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(option))}'"):
        KFAC(nn.Linear(4, 3), **option)


def test_kfac_has_no_spheres() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    rows = {"params": [net[0].weight], "manifold": "row"}
    with pytest.raises(ValueError, match="KFAC keeps all parameters in Euclidean space, got manifold='row'; use MKFAC"):
        KFAC([rows], model_of_groups=net)
    optimizer = KFAC([{"params": net[1].parameters(), "manifold": "none"}], model_of_groups=net)
    with pytest.raises(ValueError, match="got manifold='row'"):
        optimizer.add_param_group(rows)
    assert len(optimizer.param_groups) == 1


def test_every_option_of_kfac_is_one_of_mkfac_with_its_default() -> None:
    mine, theirs = (inspect.signature(kind).parameters for kind in (KFAC, MKFAC))
    assert {name: p.default for name, p in mine.items()} == {name: theirs[name].default for name in mine}
    net, settings = nn.Linear(4, 3), {"damping_mode": "factored", "basis": 0.5, "basis_tolerance": 0.1, "max_rows": 7}
    optimizer = KFAC(net, **settings, fisher="mc", reduction="sum", factor_decay=0.0, allow_tf32=False, seed=3)
    options = optimizer.curvature.options
    assert options == CurvatureOptions("factored", 0.5, 0.1, static=False, allow_tf32=False, keep_factors=False)
    assert (optimizer.fisher, optimizer.reduction, optimizer.max_rows, optimizer.seed) == ("mc", "sum", 7, 3)


def long_rows(scale: float, kind: str) -> nn.Module:
    """A trained network whose rows are not of unit length, each of another one; ε is out of the way."""
    torch.manual_seed(3)
    first = nn.Conv2d(2, 6, 3, padding=1, groups=2 if kind == "grouped" else 1, bias=kind != "blocks")
    norm = nn.GroupNorm(2, 6, eps=1e-14) if kind == "blocks" else nn.BatchNorm2d(6, eps=1e-14)
    net = nn.Sequential(first, norm, nn.Tanh(), nn.Flatten(), nn.Linear(216, 4)).double()
    with torch.no_grad():
        lengths = [1, 1, 1, 2, 2, 2] if kind == "blocks" else list(range(1, 7))
        first.weight.mul_(scale * torch.tensor(lengths).view(6, 1, 1, 1))
    net(data()[0].double() + 0.5)
    return net


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rows", {}),
        ("rows", {"fisher": "persample"}),
        ("rows", {"balanced": True, "clip": 0.5, "orthogonality": 0.01, "retraction": "normalize"}),
        ("rows", {"capturable": True}),
        ("grouped", {"fisher": "mc"}),
        ("blocks", {}),
    ],
)
def test_weights_loaded_later_turn_as_those_loaded_before(scale: float, kind: str, options: dict[str, Any]) -> None:
    """Rows keep the lengths they are loaded with, so that running statistics fit; the way is that of unit rows."""
    (x, y), invariant = data(), {"0.weight": 2 if kind == "blocks" else "row"}
    x, ways = x.double(), []
    for late in (False, True):
        net = long_rows(1.0 if late else scale, kind)
        settings: dict[str, Any] = {"lr": 0.1, "manifold_lr": 0.1, "damping": 0.1, "basis": "full", **options}
        optimizer = MKFAC(net, **settings, invariant=invariant, example_input=x)
        if late:
            net.load_state_dict(long_rows(scale, kind).state_dict())
        lengths = net[0].weight.detach().reshape(2 if kind == "blocks" else 6, -1).norm(dim=1)
        for step in range(4):
            if step == 1:
                optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
            with optimizer.statistics(enabled=step == 2):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
            optimizer.step()
        after = net[0].weight.detach().reshape(len(lengths), -1)
        torch.testing.assert_close(after.norm(dim=1), lengths)
        turned = [F.normalize(after), *(p.detach() for p in list(net.parameters())[1:])]
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        ways.append((turned, net.eval()(x).detach(), optimizer.diagnostics()["0.weight"].cosine))
    torch.testing.assert_close(*ways, rtol=1e-6, atol=1e-8)


def test_a_row_without_a_direction_is_moved_by_its_own_gradient_beside_long_ones() -> None:
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3))
    with torch.no_grad():
        net[0].weight[1] = 0.0
    with pytest.warns(UserWarning, match="1 of 3 rows is zero or tiny"):
        optimizer = MKFAC(net, lr=0.1, manifold_lr=0.1, momentum=0.0)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[3.0, 0, 0, 0], [0, 5, 0, 0], [0, 0, 1, 0]]))
    net[0].weight.grad = torch.ones(3, 4)
    optimizer.step()
    torch.testing.assert_close(net[0].weight[1].detach(), torch.tensor([-0.1, 4.9, -0.1, -0.1]))
    torch.testing.assert_close(net[0].weight.detach().norm(dim=1)[::2], torch.tensor([3.0, 1.0]))
    # the gradient at unit length is three times as long
    angle = 0.1 * 3 * 3**0.5
    torch.testing.assert_close(float(net[0].weight[0, 0].detach()), 3 * math.cos(angle), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_natural_gradients_for_another_optimizer_do_not_depend_on_lengths(scale: float) -> None:
    """V = r (A ⊗ G + λI)⁻¹ r∇W, with G at unit length: a step along it turns long rows as far as short ones."""
    x, y = data()
    x, net = x.double(), long_rows(scale, "rows")
    optimizer = MKFAC(net, damping=0.05, example_input=x, basis="full")
    net.load_state_dict(long_rows(scale, "rows").state_dict())
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    F.cross_entropy(net(x), y).backward()
    layer, weight = optimizer.curvature.layers["0.weight"], net[0].weight
    assert weight.grad is not None
    gradient, lengths = weight.grad.flatten(1).clone(), weight.detach().flatten(1).norm(dim=1, keepdim=True)
    system = torch.kron(layer.g, layer.a) + 0.05 * torch.eye(6 * 18, dtype=torch.float64)
    solved = torch.linalg.solve(system, (lengths * gradient).flatten()).reshape(6, 18)
    optimizer.precondition_()
    unit = F.normalize(weight.detach().flatten(1))
    expected = lengths * (solved - (solved * unit).sum(1, keepdim=True) * unit)
    torch.testing.assert_close(weight.grad.flatten(1), expected)
    saved = optimizer.state_dict()
    del saved["curvature"]["0.weight"]["lengths"]  # as in files from before there were lengths
    optimizer.load_state_dict(saved)
    assert layer.lengths is None


def test_natural_gradients_for_another_optimizer_stay_tangent_to_rows_of_any_length() -> None:
    """Against the dense matrix and the projector I - wwᵀ/‖w‖², after steps that have changed the lengths of rows."""
    model = bn_net().double()
    x, y = data()
    optimizer = MKFAC(model, damping=0.05, example_input=x.double(), basis="full")
    optimizer.refresh([(x.double(), y)], nn.CrossEntropyLoss())
    other = torch.optim.Adam(model.parameters(), lr=0.05)
    layer, weight = optimizer.curvature.layers["3.weight"], model[3].weight
    system = torch.kron(layer.g, layer.a) + 0.05 * torch.eye(8 * 54, dtype=torch.float64)
    for _ in range(4):
        other.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        v = torch.linalg.solve(system, weight.grad.flatten()).reshape(8, 54)
        w = F.normalize(weight.detach().flatten(1))
        optimizer.precondition_()
        torch.testing.assert_close(weight.grad.flatten(1), v - (w * v).sum(1, keepdim=True) * w)
        other.step()
    assert float((weight.detach().flatten(1).norm(dim=1) - 1).abs().min()) > 0.1


def test_groups_schedulers_and_closures_work_as_in_torch() -> None:
    model = bn_net()
    x, y = data()
    optimizer = MKFAC(model, lr=0.1, manifold_lr=0.2, weight_decay=1e-2, example_input=x)
    flat, curved = optimizer.param_groups
    assert (flat["lr"], flat["weight_decay"], curved["lr"], curved["weight_decay"]) == (0.1, 1e-2, 0.2, 0.0)
    assert curved["param_names"] == ["0.weight", "3.weight"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.1**e, lambda e: 0.2**e])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) > 0
    scheduler.step()
    assert flat["lr"] == pytest.approx(0.01)
    assert curved["lr"] == pytest.approx(0.04)


def test_euclidean_parameters_follow_torch_sgd() -> None:
    ours, theirs = bn_net(), bn_net()
    x, y = data()
    optimizer = MKFAC(ours, lr=0.1, weight_decay=1e-2, invariant="none")
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for _ in range(3):
        for model, one in ((ours, optimizer), (theirs, reference)):
            one.zero_grad()
            F.cross_entropy(model(x), y).backward()
            one.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_explicit_groups_with_and_without_modules() -> None:
    model, twin = bn_net(), bn_net()
    x, y = data()
    automatic = MKFAC(twin, lr=0.1, manifold_lr=0.2, damping=0.1, example_input=x)
    names = dict(model.named_parameters())
    curved = [names.pop("0.weight"), names.pop("3.weight")]
    groups = [{"params": list(names.values())}, {"params": curved, "manifold": "row"}]
    explicit = MKFAC(groups, lr=0.1, manifold_lr=0.2, damping=0.1, model_of_groups=model)
    for net, optimizer in ((model, explicit), (twin, automatic)):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    alone = MKFAC([{"params": [nn.Parameter(torch.randn(4, 6))], "manifold": 2, "lr": 0.3}])
    assert alone.param_groups[0]["spheres"] == [2]
    with pytest.raises(RuntimeError, match="curvature needs the modules: pass model_of_groups"):
        alone.refresh([(x, y)], nn.CrossEntropyLoss())


@pytest.mark.parametrize("kind", [MKFAC, SGDG])
def test_what_speaks_of_a_module_is_refused_for_parameters(kind) -> None:
    """Without it the optimizer would be SGD, and nobody would know."""
    model, x = bn_net(), data()[0]
    with pytest.raises(ValueError, match=r"example_input needs a module as model, got parameters \(generator\)"):
        kind(model.parameters(), example_input=x)
    for invariant in ("probe", {"0.weight": "row"}):
        with pytest.raises(ValueError, match=r"invariant=.* needs a module as model, got parameters \(list\)"):
            kind(list(model.parameters()), invariant=invariant)
    with pytest.raises(ValueError, match="model_of_groups is for parameter groups, got a module"):
        MKFAC(model, model_of_groups=model)


@pytest.mark.parametrize("kind", [MKFAC, SGDG, KFAC])
def test_parameters_without_their_module_are_a_warning(kind) -> None:
    """What one writes for torch.optim.SGD would be just that."""
    model = bn_net()
    for given in (model.parameters(), model.named_parameters(), [{"params": list(model.parameters())}]):
        with pytest.warns(UserWarning, match=r"moved by SGD.*pass model in place of model.parameters\(\)"):
            kind(given)
    kind([{"params": list(model.parameters()), "manifold": "none"}])


def test_gradients_in_another_memory_layout_are_understood() -> None:
    """Fused kernels read flat memory: a transposed gradient must not be taken for a straight one."""
    ours, theirs = (nn.Parameter(torch.arange(6.0).reshape(2, 3)) for _ in range(2))
    gradient = torch.arange(6.0).reshape(3, 2).T
    for parameter, optimizer in (
        (ours, MKFAC([{"params": [ours], "manifold": "none"}], lr=0.1)),
        (theirs, torch.optim.SGD([theirs], lr=0.1, momentum=0.9)),
    ):
        for _ in range(2):
            parameter.grad = gradient.clone() if parameter is theirs else gradient
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_refresh_leaves_the_model_alone() -> None:
    model = bn_net()
    x, y = data()
    optimizer = MKFAC(model, example_input=x)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    optimizer.refresh([(x, y)] * 2, nn.CrossEntropyLoss())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert bool((model[0].weight.grad == 1).all())
    assert model[3].weight.grad is None


@pytest.mark.parametrize("fisher", ["empirical", "mc", "persample"])
def test_a_network_that_is_frozen_below_its_head_needs_no_curvature(fisher: str) -> None:
    """Its norms may be in evaluation mode, its frozen weights cost nothing, and what is freed joins."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8))
    net = nn.Sequential(body, nn.Linear(8, 3))
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    optimizer = MKFAC(net, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x, fisher=fisher)
    body.requires_grad_(False).eval()

    def renewed() -> set[str]:
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
        return {name for name, layer in optimizer.curvature.layers.items() if layer.inverse is not None}

    assert renewed() == set()
    with optimizer.statistics():
        F.cross_entropy(net(x), y).backward()
    optimizer.step()
    body.train()
    body[3].requires_grad_(True)
    assert renewed() == {"0.3.weight"}


@pytest.mark.parametrize("fisher", ["empirical", "persample"])
def test_frozen_features_in_evaluation_mode_are_as_good_as_data(fisher: str) -> None:
    """The curvature of a head is that of the head alone, and norms behind something trained stay refused."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
    net = nn.Sequential(body, nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    x, y = torch.randn(16, 6).double(), torch.randint(3, (16,))
    body.requires_grad_(False)
    optimizer = MKFAC(net, damping=0.1, example_input=x, fisher=fisher)
    body.eval()
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    alone = MKFAC(net[1:], damping=0.1, example_input=body(x), fisher=fisher)
    alone.refresh([(body(x), y)], nn.CrossEntropyLoss())
    ours, theirs = optimizer.curvature.layers["1.weight"], alone.curvature.layers["1.weight"]
    torch.testing.assert_close(ours.a, theirs.a)
    torch.testing.assert_close(ours.g, theirs.g)
    body[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"batch norm '0.1' is in eval mode"):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"batch norm '0.1' is in eval mode"), optimizer.statistics():
        net(x)
    assert all(not module._forward_pre_hooks for module in net.modules())


def test_instance_norms_on_running_statistics_are_refused() -> None:
    norm = nn.InstanceNorm1d(5, track_running_stats=True)
    net, x = nn.Sequential(nn.Conv1d(2, 5, 3), norm, nn.Flatten(), nn.Linear(30, 3)), torch.randn(16, 2, 8)
    optimizer = MKFAC(net, damping=0.1, example_input=x)
    optimizer.refresh([(x, torch.randint(3, (16,)))], nn.CrossEntropyLoss())
    net.eval()
    with pytest.raises(ValueError, match="batch norm '1' is in eval mode"):
        optimizer.refresh([(x, torch.randint(3, (16,)))], nn.CrossEntropyLoss())


def test_report_and_diagnostics_of_biases_and_of_modules_that_are_not_called() -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x = torch.randn(4, 3, 8)
    optimizer = MKFAC(net, damping=0.1, example_input=x, euclidean="kfac")
    assert "not called" not in optimizer.report()
    optimizer.refresh([(x, torch.randn_like(x))], nn.MSELoss())
    net(x).square().mean().backward()
    (line,) = (line for line in optimizer.report().splitlines() if "not called" in line)
    assert line.startswith("self_attn.out_proj.weight")
    found = optimizer.diagnostics()
    assert set(found) == {"linear1.weight", "linear2.weight"}
    gradient = net.linear1.weight.grad.clone()
    optimizer.precondition_()
    cosine = F.cosine_similarity(gradient.flatten(), net.linear1.weight.grad.flatten(), dim=0)
    assert found["linear1.weight"].cosine == pytest.approx(float(cosine), abs=1e-5)


class Checkpointed(nn.Module):
    """Its middle is computed twice, in the older of PyTorch's two ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.middle = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(checkpoint(self.middle, x, use_reentrant=True) if self.reentrant else self.middle(x))


def test_reentrant_checkpoints_change_nothing() -> None:
    moved = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        net, x, y = Checkpointed(reentrant), torch.randn(16, 6), torch.randint(3, (16,))
        optimizer = MKFAC(net, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x)
        with optimizer.statistics():
            F.cross_entropy(net(x), y).backward()
        optimizer.step()
        assert optimizer.findings["middle.0.weight"].kind == "tensor"
        moved.append(net.middle[0].weight.detach())
    assert torch.equal(*moved)


def test_refresh_goes_through_reentrant_checkpoints() -> None:
    moved = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        net, x, y = Checkpointed(reentrant), torch.randn(16, 6), torch.randint(3, (16,))
        optimizer = MKFAC(net, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x, euclidean="kfac")
        F.cross_entropy(net(x), y).backward()
        before = [p.grad.clone() for p in net.parameters()]
        optimizer.refresh([(x, y), (x[:8], y[:8])], nn.CrossEntropyLoss())
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))
        optimizer.step()
        moved.append([p.detach() for p in net.parameters()])
    torch.testing.assert_close(*moved)
    net.last.weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("the hook of a user has run"))
    with pytest.raises(RuntimeError, match="use_reentrant=False, or collect curvature with statistics"):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


def test_frozen_unused_and_late_unfrozen_layers() -> None:
    net, example, _ = build("unused-layer")
    net.p.weight.requires_grad_(False)
    frozen = net.p.weight.detach().clone()
    optimizer = MKFAC(net, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=example, euclidean="kfac")
    assert torch.equal(net.p.weight, frozen)

    def go() -> None:
        with optimizer.statistics():
            optimizer.zero_grad()
            F.cross_entropy(net(example), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()

    go()
    assert torch.equal(net.p.weight, frozen)
    net.p.weight.requires_grad_(True)
    go()
    assert not torch.equal(net.p.weight, frozen)
    assert float((net.p.weight.detach().norm(dim=1) - 1).abs().max()) < 1e-6
    assert optimizer.curvature.layers["p.weight"].inverse is not None
    assert optimizer.curvature.layers["unused.weight"].inverse is None


@pytest.mark.parametrize(("euclidean", "invariant"), [("sgd", "probe"), ("kfac", "none")])
def test_channels_last_and_in_place_activations_change_nothing(euclidean: str, invariant: str) -> None:
    reference, other = bn_net(), bn_net(inplace=True).to(memory_format=torch.channels_last)
    x, _ = data()
    histories = []
    for model in (reference, other):
        optimizer = MKFAC(
            model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x, euclidean=euclidean, invariant=invariant
        )
        histories.append(train(model, optimizer, 6))
    assert other[3].weight.is_contiguous(memory_format=torch.channels_last)
    assert histories[0] == pytest.approx(histories[1], rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "options"), [(MKFAC, {}), (MKFAC, {"euclidean": "kfac"}), (KFAC, {}), (MKFAC, {"invariant": "none"})]
)
def test_slices_of_larger_tensors_move_as_tensors_of_their_own(kind: type, options: dict[str, Any]) -> None:
    """Parameters with memory between their entries, as the first channels of a trained layer are."""
    (x, _), around, moved = data(), [], []
    for sliced in (False, True):
        model = bn_net().double()
        for parameter in [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)] if sliced else []:
            weight = parameter.weight.detach()
            wider = torch.cat([weight, weight], dim=1)
            around.append((wider[:, weight.shape[1] :], weight.clone()))
            parameter.weight = nn.Parameter(wider[:, : weight.shape[1]])
            assert not parameter.weight.is_contiguous()
        spheres = {"example_input": x} if kind is MKFAC else {}
        optimizer = kind(model, lr=0.1, damping=0.1, **spheres, **options)
        for step in range(4):
            with optimizer.statistics(enabled=step % 2 == 0):
                optimizer.zero_grad()
                F.cross_entropy(model(x.double()), data()[1]).backward()
            optimizer.step()
        moved.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*moved, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(now, before) for now, before in around)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler_trains(dtype: torch.dtype) -> None:
    model = bn_net()
    x, y = data()
    optimizer = MKFAC(model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=256.0)
    losses = []
    for step in range(12):
        with optimizer.statistics(enabled=step % 4 == 0, grad_scaler=scaler):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    layer = optimizer.curvature.layers["0.weight"]
    assert layer.a.dtype == layer.inverse.right.dtype == torch.float32


def test_overflow_under_loss_scaling_is_dropped_without_a_count() -> None:
    model = bn_net()
    x, y = data()
    optimizer = MKFAC(model, damping=0.1, example_input=x)

    class Scaler:
        def get_scale(self) -> float:
            return 1.0

    for _ in range(5):
        with optimizer.statistics(grad_scaler=Scaler()):
            (F.cross_entropy(model(x), y) * float("inf")).backward()
    assert optimizer.curvature.layers["0.weight"].failures == 0
    assert optimizer.curvature.layers["0.weight"].inverse is None


def test_compiled_model_gives_statistics_and_is_not_recompiled() -> None:
    """Hooks run through the uncompiled module; before and after, the same compiled code is used."""
    model = bn_net()
    x, y = data()
    compiles: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiles.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    optimizer = MKFAC(compiled, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x)
    reference_model = bn_net()
    reference = MKFAC(reference_model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x)
    F.cross_entropy(compiled(x), y).backward()
    first = len(compiles)
    assert first >= 1
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    reference.refresh([(x, y)], nn.CrossEntropyLoss())
    torch.testing.assert_close(
        optimizer.curvature.layers["3.weight"].g, reference.curvature.layers["3.weight"].g, rtol=1e-3, atol=1e-7
    )
    with optimizer.statistics():
        F.cross_entropy(compiled(x), y).backward()
    compiled(x)
    assert len(compiles) == first


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # on importing the compiler
def test_a_compiled_training_step_has_the_step_of_the_optimizer_as_it_is() -> None:
    """Compiled, it would be many graphs, guarded by every parameter, and Inductor fails on some of them."""
    x, y = data()
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    def training_step(model: nn.Module, optimizer: MKFAC) -> Callable[[], None]:
        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    models = [bn_net(), bn_net()]
    optimizers = [MKFAC(model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x) for model in models]
    plain, other = (training_step(*pair) for pair in zip(models, optimizers, strict=True))
    compiled = torch.compile(other, backend=backend)
    for optimizer in optimizers:
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    for _ in range(3):
        plain()
        compiled()
    assert len(graphs) == 1  # the model and its loss
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # on importing the compiler
def test_statistics_inside_of_what_is_compiled_are_refused_and_outside_they_are_taken() -> None:
    model = bn_net()
    x, y = data()
    optimizer = MKFAC(model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x)
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    def collecting() -> None:
        with optimizer.statistics():
            loss().backward()

    with pytest.raises(RuntimeError, match=r"call statistics\(\) outside of what is compiled"):
        torch.compile(collecting, backend=backend)()
    compiled = torch.compile(loss, backend=backend)
    compiled().backward()
    assert len(graphs) == 1  # the refusal has left the compiler as it was
    with optimizer.statistics():
        compiled().backward()
    assert optimizer.diagnostics()["3.weight"].cosine < 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # on importing the compiler
def test_compiled_parts_of_a_model_are_not_compiled_for_the_probe() -> None:
    compiles: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiles.append(1)
        return graph.forward

    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
    with torch.no_grad():
        part[1].running_var.fill_(2.0)
    model = nn.Sequential(torch.compile(part, backend=backend), nn.Linear(8, 3))
    optimizer = MKFAC(model, damping=0.1, example_input=torch.randn(16, 6))
    assert {name for name, found in optimizer.findings.items() if found.spheres} == {"0._orig_mod.0.weight"}
    assert compiles == []


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # on importing the compiler
def test_fused_update_equals_the_plain_one() -> None:
    x, _ = data()
    results = []
    for fuse in (False, True):
        model = bn_net()
        optimizer = MKFAC(model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x, fuse=fuse)
        results.append(train(model, optimizer, 5))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_capturable_keeps_memory_in_place_and_takes_the_rate_from_a_tensor() -> None:
    plain_model, model = bn_net(), bn_net()
    x, y = data()
    plain = MKFAC(plain_model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x)
    optimizer = MKFAC(model, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x, capturable=True)
    assert train(plain_model, plain, 6, refresh=3) == pytest.approx(train(model, optimizer, 6, refresh=3), rel=1e-4)
    layer = optimizer.curvature.layers["3.weight"]
    place = layer.inverse.left.data_ptr()
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    assert layer.inverse.left.data_ptr() == place
    rate = optimizer.param_groups[1]["lr"]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[1]["lr"] is rate
    assert float(rate) == pytest.approx(0.01)


def test_bf16_weights_stay_unit_to_their_precision() -> None:
    model = bn_net().to(torch.bfloat16)
    x, y = data()
    optimizer = MKFAC(model, lr=0.05, manifold_lr=0.05, damping=0.1, example_input=x.bfloat16())
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()
    norms = model[3].weight.detach().float().reshape(8, -1).norm(dim=1)
    assert float((norms - 1).abs().max()) < 4e-3


def test_zero_rows_stay_euclidean_with_one_warning() -> None:
    model = bn_net()
    with torch.no_grad():
        model[3].weight[2].zero_()
    x, y = data()
    with pytest.warns(UserWarning, match="3.weight: 1 of 8 rows is zero or tiny and stays Euclidean") as caught:
        optimizer = MKFAC(model, lr=0.1, manifold_lr=0.1, invariant={"3.weight": "row"})
    assert len(caught) == 1
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    norms = model[3].weight.detach().reshape(8, -1).norm(dim=1)
    assert bool(torch.isfinite(norms).all())
    assert [i for i in range(8) if abs(float(norms[i]) - 1) > 1e-5] == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"damping_mode": "factored"},
        {"basis": "full"},
        {"basis": 0.25},
        {"retraction": "normalize"},
        {"max_angle": 0.1},
        {"clip": 0.1},
        {"orthogonality": 0.01},
        {"euclidean": "kfac"},
        {"fisher": "mc"},
    ],
)
def test_every_option_descends(options: dict[str, Any]) -> None:
    model = bn_net()
    x, _ = data()
    optimizer = MKFAC(model, lr=0.05, manifold_lr=0.05, damping=0.1, example_input=x, **options)
    losses = train(model, optimizer, 15)
    assert losses[-1] < 0.5 * losses[0]


def correlation(weight: torch.Tensor) -> float:
    rows = weight.detach().flatten(1)
    return float((rows @ rows.T - torch.eye(len(rows))).abs().max())


@pytest.mark.parametrize("balanced", [False, True])
def test_orthogonality_takes_rows_apart_where_they_can_be(balanced: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 1, bias=False), nn.BatchNorm2d(12), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip
    x = torch.randn(16, 3, 6, 6)
    model(x)
    optimizer = SGDG(model, 0.1, 0.2, momentum=0.5, orthogonality=0.5, balanced=balanced, example_input=x)
    weights = {index: model[index].weight for index in (0, 3, 6)}
    before = {index: weight.detach().clone() for index, weight in weights.items()}
    assert correlation(before[0]) > 0.2
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(200):
        optimizer.step()
    assert correlation(weights[0]) < 1e-4
    # rows of different groups see different inputs, and twelve rows of eight entries cannot be orthogonal
    assert all(torch.allclose(weights[index], before[index], atol=1e-6) for index in (3, 6))
    norms = weights[0].flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(8))


@pytest.mark.parametrize("orthogonality", [0.0, 0.1])
def test_long_directions_are_cut_before_they_join_the_momentum(orthogonality: float) -> None:
    """Against Cho and Lee's step: penalty, projection, cut, momentum, geodesic, transport."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    x, clip, rate, momentum = torch.randn(8, 12, dtype=torch.float64), 0.7, 0.3, 0.9
    options = {"momentum": momentum, "clip": clip, "orthogonality": orthogonality, "example_input": x}
    optimizer = SGDG(model, 0.1, rate, **options)
    w, velocity = model[0].weight.detach().clone(), torch.zeros(6, 12, dtype=torch.float64)
    cut = 0
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = 0.2 * torch.randn_like(parameter)
        g = model[0].weight.grad + 2 * orthogonality * (w @ w.T @ w - w)
        h = g - (g * w).sum(1, keepdim=True) * w
        lengths = h.norm(dim=1, keepdim=True)
        cut += int((lengths > clip).sum())
        velocity = momentum * velocity + torch.where(lengths > clip, h * clip / lengths, h)
        speed = velocity.norm(dim=1, keepdim=True)
        assert bool((rate * speed <= rate * clip / (1 - momentum)).all())
        cos, sin = (rate * speed).cos(), (rate * speed).sin()
        w, velocity = cos * w - sin * velocity / speed, cos * velocity + sin * speed * w
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), w)
    assert 0 < cut < 30


class AssignsItsStatistics(nn.Module):
    """A normalisation that gives its running mean another tensor at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return (x - x.mean(0)) / x.std(0)


def test_refresh_leaves_statistics_alone_that_are_assigned() -> None:
    torch.manual_seed(0)
    net, x = AssignsItsStatistics(), torch.randn(8, 4)
    opt = MKFAC(net, example_input=x)
    before = net.mean
    opt.refresh([(x, torch.randint(3, (8,)))], nn.CrossEntropyLoss())
    assert net.mean is before
    assert torch.equal(before, torch.zeros(3))


def test_layers_that_are_added_later_get_their_rate_and_their_curvature() -> None:
    """A new block at the end of a network is trained like one that was there from the start."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.randint(7, (20,))
    late = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
    opt = MKFAC(late, 0.1, 0.5, euclidean="kfac", example_input=x)
    for layer in (nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 7)):
        late.append(layer)
    early = copy.deepcopy(late)
    opt.add_param_group({"params": [late[3].weight], "manifold": "row"})
    opt.add_param_group({"params": [late[3].bias, *late[4].parameters(), *late[5].parameters()]})
    reference = MKFAC(early, 0.1, 0.5, euclidean="kfac", example_input=x)
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.5, 0.5, 0.1]
    assert opt.curvature.layers.keys() == reference.curvature.layers.keys()
    for net, optimizer in ((late, opt), (early, reference)):
        for _ in range(3):
            optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    for mine, theirs in zip(late.parameters(), early.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("frozen", ["never", "before", "later"])
def test_a_bias_that_is_not_optimised_has_no_say_in_the_direction(frozen: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x, y = torch.randn(50, 4, dtype=torch.float64) + 5, torch.randint(3, (50,))
    net.bias.requires_grad_(frozen != "before")
    groups = [{"params": [net.weight] if frozen == "never" else net.parameters()}]
    opt = KFAC(groups, damping=1e-2, model_of_groups=net)
    net.bias.requires_grad_(frozen == "never")
    opt.refresh([(x, y)], nn.CrossEntropyLoss())
    F.cross_entropy(net(x), y).backward()
    gradients = (net(x).softmax(1) - F.one_hot(y, 3)).detach()
    fisher = torch.kron(gradients.T @ gradients / 50, x.T @ x / 50)
    assert net.weight.grad is not None
    expected = torch.linalg.solve(fisher + 1e-2 * torch.eye(12, dtype=torch.float64), net.weight.grad.flatten())
    opt.precondition_()
    torch.testing.assert_close(net.weight.grad.flatten(), expected)


def test_a_gradient_that_the_loss_is_made_of_is_not_that_of_the_loss() -> None:
    """A penalty on the gradient by the inputs: the inner backward pass has no part in the curvature."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    x = torch.randn(20, 4, dtype=torch.float64, requires_grad=True)
    opt = KFAC(critic)
    with opt.statistics():
        scores = critic(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        (scores.mean() + 10 * (slopes.norm(dim=1) - 1).square().mean()).backward()
    layer = opt.curvature.layers["2.weight"]
    assert layer.g is not None
    assert float(layer.g) / layer.mass == pytest.approx(1.0)  # of every score's own term, which is the score


@pytest.mark.parametrize("length", [0.1, 10.0])
@pytest.mark.parametrize("curved", [True, False])
def test_a_layer_that_is_freed_turns_as_if_it_had_never_been_frozen(length: float, curved: bool) -> None:
    """Its gradient at its first step is that at rows of another length."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=1e-12), nn.ReLU(), nn.Linear(6, 3)).double()
    net[0].weight.data.mul_(length)
    free, freed = net, copy.deepcopy(net)
    freed[0].requires_grad_(False)
    optimizers = [MKFAC(model, damping=0.1, example_input=x) for model in (free, freed)]
    freed[0].requires_grad_(True)
    for model, opt in zip((free, freed), optimizers, strict=True):
        for _ in range(2):
            with opt.statistics(enabled=curved):
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
            opt.step()
    torch.testing.assert_close(freed[0].weight, free[0].weight)
