"""The step on spheres against the formulas that it stands for, and batches of weights against single ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fisherfold import manifolds
from fisherfold.optim import SphereOptimizer, spheres
from fisherfold.optim.directions.spectral import orthogonalise, orthogonalise_all
from toy import normal


@pytest.mark.parametrize("by_angle", [True, False])
def test_rotation_is_the_exponential_map_of_the_sphere(by_angle):
    w, d = normal(6, 5), normal(6, 5, seed=1)
    radius = spheres.norms(w)
    unit, flat = w / radius, spheres.tangent(w, d)
    step = flat / spheres.norms(flat) if by_angle else flat
    expected = (
        manifolds.Oblique(6, 5).exp(unit, -0.1 * step)
        if hasattr(manifolds.Oblique, "exp")
        else None
    )
    got = spheres.rotate(w, d, 0.1, by_angle=by_angle)
    torch.testing.assert_close(got / radius, expected)
    torch.testing.assert_close(spheres.norms(got), radius)
    if by_angle:
        cosines = (got * w).sum(1) / radius.squeeze(1) ** 2
        torch.testing.assert_close(
            torch.arccos(cosines), torch.full((6,), 0.1, dtype=torch.float64)
        )


def moved(ws, ds, lr, by_angle=True):
    ws = [w.clone() for w in ws]
    spheres.rotate_all_(ws, ds, [spheres.norms(w) for w in ws], lr, by_angle=by_angle)
    return ws


def test_no_direction_no_rounding():
    w = normal(6, 5).float()
    for d, lr in ((torch.zeros_like(w), 0.1), (2 * w, 0.1), (normal(6, 5, seed=1).float(), 0.0)):
        assert torch.equal(moved([w], [d], lr)[0], w)


@pytest.mark.parametrize("by_angle", [True, False])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_many_weights_in_place_are_the_reference(by_angle, scale):
    shapes = [(6, 5), (4, 2, 3), (6, 5), (1, 7), (0, 3)]
    ws = [normal(*s, seed=i) for i, s in enumerate(shapes)]
    ds = [scale * normal(*s, seed=10 + i) for i, s in enumerate(shapes)]
    lr = 0.1 if by_angle else 0.1 / scale
    for w, d, new in zip(ws, ds, moved(ws, ds, lr, by_angle), strict=True):
        torch.testing.assert_close(new, spheres.rotate(w, d, lr, by_angle=by_angle))


def test_newton_schulz_is_near_the_polar_factor():
    for shape in ((8, 20), (20, 8), (12, 12)):
        m = normal(*shape)
        u, _, v = torch.linalg.svd(m, full_matrices=False)
        singular = torch.linalg.svdvals(orthogonalise(m))
        assert bool(((singular > 0.3) & (singular < 1.3)).all())
        cosine = (orthogonalise(m) * (u @ v)).sum() / orthogonalise(m).norm() / (u @ v).norm()
        assert float(cosine) > 0.95
        torch.testing.assert_close(orthogonalise(1e-12 * m), orthogonalise(m))
    assert bool((orthogonalise(torch.zeros(3, 4)) == 0).all())


def test_many_matrices_are_orthogonalised_as_each_by_itself():
    ms = [normal(6, 5), normal(8, 3, seed=1), normal(6, 5, seed=2), normal(6, 5, seed=3)]
    found = orthogonalise_all(ms, [1, 1, 1, 3])
    for m, o in zip(ms[:3], found[:3], strict=True):
        torch.testing.assert_close(o, orthogonalise(m))
    torch.testing.assert_close(
        found[3], torch.cat([orthogonalise(part) for part in ms[3].split(2)])
    )


def prototype(w, g, b, lr, momentum=0.9):
    """One spectral step of the prototype, on unit rows."""
    b = momentum * b + g
    d = orthogonalise(g + momentum * b)
    d = d - (d * w).sum(1, keepdim=True) * w
    u = d / d.norm(dim=1, keepdim=True)
    new = w * torch.tensor(lr).cos() - u * torch.tensor(lr).sin()
    return new / new.norm(dim=1, keepdim=True), b


def test_spectral_steps_are_those_of_the_prototype_whatever_the_norms_of_rows():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-12)).double()
    scale = 0.1 + 3 * torch.rand(8, 1, dtype=torch.float64)
    unit = net[0].weight.detach() / net[0].weight.detach().norm(dim=1, keepdim=True)
    net[0].weight.data.copy_(scale * unit)
    optimizer = SphereOptimizer(net, 0.05)
    x, y = normal(32, 6), normal(32, 8, seed=1)
    buffer = torch.zeros_like(unit)
    for _ in range(5):
        w = unit.clone().requires_grad_()
        loss = (
            (
                (
                    net[1].weight
                    * nn.functional.batch_norm(x @ w.T, None, None, None, None, True, eps=1e-12)
                    + net[1].bias
                )
                - y
            )
            .square()
            .mean()
        )
        (gradient,) = torch.autograd.grad(loss, w)
        unit, buffer = prototype(unit, gradient, buffer, 0.05)
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(net[0].weight.detach() / scale, unit, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("direction", ["spectral", "gradient", "natural"])
def test_every_row_rotates_by_the_angle_and_keeps_its_norm(direction):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(128, 6, bias=False),
        nn.LayerNorm(6),
    )
    x = torch.randn(16, 3, 8, 8)
    optimizer = SphereOptimizer(net, 0.03, direction=direction, every=1, example_input=x)
    kinds = {n: f.spheres for n, f in optimizer.findings.items() if f.spheres}
    assert kinds == {"0.weight": 8, "3.weight": 2, "6.weight": 1}
    y = torch.randn(16, 6)
    for _ in range(4):
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        for name, count in kinds.items():
            old, new = (
                t.reshape(count, -1).double()
                for t in (before[name], net.get_parameter(name).detach())
            )
            cosines = (old * new).sum(1) / old.norm(dim=1) / new.norm(dim=1)
            torch.testing.assert_close(
                torch.arccos(cosines), torch.full_like(cosines, 0.03), rtol=1e-3, atol=1e-4
            )
            torch.testing.assert_close(new.norm(dim=1), old.norm(dim=1), rtol=1e-5, atol=0)


def test_buffers_and_the_function_are_not_touched_at_construction():
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    before = {n: t.clone() for n, t in net.state_dict().items()}
    SphereOptimizer(net, example_input=torch.randn(8, 5))
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
