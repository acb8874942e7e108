"""The step on spheres against its formulas: momentum, matrix signs, rotations by an angle."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fisherfold import manifolds
from fisherfold.optim import MKFAC, SphereOptimizer, spheres
from fisherfold.optim.layout import Layout
from fisherfold.optim.spectral import orthogonalise
from toy import normal


@pytest.mark.parametrize("by_angle", [True, False])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rotation_is_the_exponential_map_of_the_sphere(by_angle, scale):
    w, d = normal(6, 5), scale * normal(6, 5, seed=1)
    radius = spheres.norms(w)
    unit, flat = w / radius, spheres.tangent(w, d)
    step = flat / spheres.norms(flat) if by_angle else flat / scale
    expected = manifolds.Oblique(6, 5).exp(unit, -0.1 * step)
    lr = 0.1 if by_angle else 0.1 / scale
    angle = spheres.rotate_(w, d, lr, by_angle=by_angle)
    torch.testing.assert_close(w / radius, expected)
    torch.testing.assert_close(spheres.norms(w), radius)
    torch.testing.assert_close(angle, 0.1 * spheres.norms(step))


def test_no_direction_no_rounding():
    w = normal(6, 5).float()
    for d, lr in ((torch.zeros_like(w), 0.1), (2 * w, 0.1), (normal(6, 5, seed=1).float(), 0.0)):
        moved = w.clone()
        spheres.rotate_(moved, d, lr)
        assert torch.equal(moved, w)
    zero = torch.zeros(2, 5)
    spheres.rotate_(zero, torch.ones(2, 5), 0.1)
    assert torch.equal(zero, torch.zeros(2, 5))


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_the_sum_of_gradients_at_unit_norm(nesterov):
    """m = β m + r g: nothing is projected before the direction is."""
    w, g, m = normal(6, 5), normal(6, 5, seed=1), normal(6, 5, seed=2)
    r = w.norm(dim=1, keepdim=True)
    s = r * g
    expected = 0.9 * m + s
    u, share = spheres.momentum_(m, w, g, 0.9, nesterov=nesterov)
    torch.testing.assert_close(m, expected)
    torch.testing.assert_close(u, 0.9 * expected + s if nesterov else expected)
    assert bool((share == 1).all())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
def test_the_angle_falls_where_the_gradient_does(scale):
    """A constant gradient has its full angle; a share of it that many times less; none, none."""
    w, g = normal(4, 50).float(), scale * normal(4, 50, seed=1).float()
    m = torch.zeros_like(w)
    for _ in range(200):
        _, share = spheres.momentum_(m, w, g, 0.9, nesterov=True)
    torch.testing.assert_close(share, torch.ones(4, 1))
    factor = torch.tensor([[1.0], [0.1], [0.01], [0.0]])
    u, share = spheres.momentum_(m, w, g * factor, 0.9, nesterov=True)
    ratio = (g * factor * spheres.radii(w) / scale).norm(dim=1, keepdim=True)
    expected = (20 * ratio / (u / scale).norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(share, expected)
    assert bool(share[3] == 0)
    assert bool(share[2] < 0.03)


def hidden_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("what", ["all", "row", "branch"])
def test_stale_momentum_turns_nothing(what):
    """After 20 steps, 100 with gradients of zero: of all weights, of a row, of a branch that is not used."""
    net = hidden_net()
    optimizer = SphereOptimizer(net)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    for step in range(120):
        if step == 20:
            before = net[0].weight.detach().clone()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if step >= 20:
            rows = slice(0, 1) if what == "row" else slice(None)
            for p in net.parameters():
                p.grad[rows if p is net[0].weight else slice(0)] = 0.0
                if what == "branch" and p is net[0].weight:
                    p.grad = None
        optimizer.step()
    cosine = F.cosine_similarity(before[0], net[0].weight.detach()[0], dim=0)
    assert float(torch.arccos(cosine.clamp(max=1.0))) < 0.1
    if what == "row":
        assert not torch.equal(before[1], net[0].weight.detach()[1])


def test_norms_do_not_drift():
    """The rounding of norms has a fixed point: after some thousand steps norms are what they were after the first."""
    w = 3 * normal(16, 9).float()
    start = w.double().norm(dim=1)
    m = torch.zeros_like(w)
    generator = torch.Generator().manual_seed(3)
    seen = []
    for _ in range(3000):
        u, share = spheres.momentum_(
            m, w, torch.randn(16, 9, generator=generator), 0.9, nesterov=True
        )
        spheres.rotate_(w, u, 0.02 * share)
        seen.append(spheres.radii(w))
    assert all(torch.equal(r, seen[0]) for r in seen)
    assert float((w.double().norm(dim=1) / start - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("gram", [True, False])
def test_newton_schulz_is_near_the_polar_factor(gram):
    for shape in ((8, 20), (20, 8), (12, 12)):
        m = normal(*shape)
        u, _, v = torch.linalg.svd(m, full_matrices=False)
        sign = orthogonalise(m, gram=gram)
        singular = torch.linalg.svdvals(sign)
        assert bool(((singular > 0.3) & (singular < 1.3)).all())
        cosine = (sign * (u @ v)).sum() / sign.norm() / (u @ v).norm()
        assert float(cosine) > 0.95
        torch.testing.assert_close(orthogonalise(1e-12 * m, gram=gram), sign)
        torch.testing.assert_close(sign, orthogonalise(m, gram=not gram))
    assert bool((orthogonalise(torch.zeros(3, 4)) == 0).all())
    assert orthogonalise(normal(8, 20), 9).std() > 0


def test_stacks_are_orthogonalised_as_each_matrix_by_itself():
    ms = normal(4, 6, 5)
    for m, o in zip(ms, orthogonalise(ms), strict=True):
        torch.testing.assert_close(o, orthogonalise(m))


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((6, 4, 3), Layout(1, 6)),
        ((6, 4, 3), Layout(3, 2)),
        ((4, 6), Layout(1, 6, 1)),
        ((2, 4, 6), Layout(2, 6, 2)),
        ((4, 6, 3), Layout(1, 6, 1)),
    ],
)
def test_layouts_are_undone(shape, layout):
    t = normal(*shape)
    matrices = layout.split(t)
    assert matrices.shape == (
        layout.matrices,
        layout.rows,
        t.numel() // layout.matrices // layout.rows,
    )
    assert torch.equal(layout.join(matrices, shape), t)


def test_spectral_steps_are_those_of_the_formula_whatever_the_norms_of_rows():
    """Two steps of a convolution in two groups, by hand: each group is a matrix, each row a sphere."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(96, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()
    net[0].weight.data.mul_(0.1 + 3 * torch.rand(6, 1, 1, 1, dtype=torch.float64))
    optimizer = SphereOptimizer(net, 0.05)
    x, y = normal(16, 4, 6, 6), torch.arange(16) % 3
    w = net[0].weight.detach().clone().reshape(6, -1)
    m = torch.zeros_like(w)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        r = w.norm(dim=1, keepdim=True)

        def flat(d, w=w, r=r):
            return d - (d * w).sum(1, keepdim=True) / r.square() * w

        s = r * net[0].weight.grad.reshape(6, -1)
        m = 0.9 * m + s
        d = torch.cat([orthogonalise(part) for part in (s + 0.9 * m).chunk(2)])
        d = flat(d) / flat(d).norm(dim=1, keepdim=True)
        w = torch.cos(torch.tensor(0.05)) * w - torch.sin(torch.tensor(0.05)) * r * d
        optimizer.step()
        found = net[0].weight.detach().reshape(6, -1)
        torch.testing.assert_close(found, w, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("direction", ["spectral", "gradient", "natural"])
def test_every_hidden_row_turns_by_the_angle_and_keeps_its_norm(direction):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, bias=False),
        nn.ConvTranspose2d(8, 6, 2),
        nn.Flatten(),
        nn.Linear(150, 6, bias=False),
        nn.GELU(),
        nn.Linear(6, 6),
        nn.GELU(),
        nn.Linear(6, 4),
    )
    x, y = torch.randn(16, 3, 8, 8), torch.randn(16, 4)
    overrides = {"8.weight": "tensor"}
    optimizer = SphereOptimizer(net, 0.03, direction=direction, every=1, overrides=overrides)
    for _ in range(4):
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
        for name in ("0.weight", "3.weight", "4.weight", "6.weight", "8.weight"):
            pair = [before[name].double(), net.get_parameter(name).detach().double()]
            if name == "4.weight":
                pair = [t.transpose(0, 1) for t in pair]
            old, new = (t.flatten()[None] if name == "8.weight" else t.flatten(1) for t in pair)
            cosines = F.cosine_similarity(old, new)
            expected = torch.full_like(cosines, 0.03)
            torch.testing.assert_close(torch.arccos(cosines), expected, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(new.norm(dim=1), old.norm(dim=1), rtol=1e-5, atol=0)


def test_presets_turn_the_blocks_that_the_probe_finds():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.GroupNorm(2, 8),
        nn.Flatten(),
        nn.Linear(288, 6, bias=False),
        nn.LayerNorm(6),
    )
    x = torch.randn(8, 3, 8, 8)
    optimizer = MKFAC(net, every=1, example_input=x)
    assert optimizer.param_groups[0]["spheres"] == [2, 1]
    before = [p.detach().clone() for p in net.parameters()]
    net(x).square().sum().backward()
    optimizer.step()
    for index, blocks in ((0, 2), (3, 1)):
        old, new = (t.reshape(blocks, -1) for t in (before[index], list(net.parameters())[index]))
        torch.testing.assert_close(new.norm(dim=1), old.norm(dim=1), rtol=1e-5, atol=0)


def test_too_large_angles_are_reported_once():
    net = hidden_net()
    optimizer = SphereOptimizer(net, 0.7)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    F.cross_entropy(net(x), y).backward()
    with pytest.warns(UserWarning, match=r"rows would turn by 0\.7 radians in a step"):
        optimizer.step()
    optimizer.step()  # an error if it warned again


def test_buffers_and_the_function_are_not_touched_at_construction():
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    before = {n: t.clone() for n, t in net.state_dict().items()}
    SphereOptimizer(net)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


def test_momenta_of_one_shape_stay_in_one_stack():
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3))
    optimizer = SphereOptimizer(net)
    places = []
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        momenta = [optimizer.state[net[i].weight]["momentum"] for i in range(3)]
        places.append([m.data_ptr() for m in momenta])
        assert momenta[0]._base is momenta[2]._base
    assert places[1] == places[2]
