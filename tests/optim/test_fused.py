"""The fused step against its reference, on a GPU or in Triton's interpreter."""

import copy
import os

import pytest
import torch

# before Triton is imported, whose own functions are interpreted as well
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs Triton: make integrations")

import fisherfold
from fisherfold.optim import spheres
from fisherfold.optim.fused import FusedStep, OffSphere, OnSphere, fused_steps, has_dense_rows
from fisherfold.optim.spectral import orthogonalise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
LR = 0.05
BETA = 0.9
ON = {"lr": LR, "momentum": BETA}
OFF = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
# shape, number of matrices, channels last
WEIGHTS = {
    "tall": ((48, 3, 3, 3), 1, False),
    "wide, channels last": ((20, 18, 3, 3), 1, True),
    "several tiles": ((70, 90), 1, False),
    "three parts": ((48, 16), 3, False),
    "long rows": ((6, 2100), 1, False),
    "depthwise": ((10, 1, 3, 3), 10, False),
}


def matrix(shape, splits, channels_last, name="w"):
    """A hidden matrix with a gradient in the other memory format, and a momentum."""
    weight = torch.randn(shape, device=DEVICE)
    if channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(weight)
    parameter.grad = 1e-1 * torch.randn(shape, device=DEVICE)
    momentum = torch.empty_like(weight).copy_(2e-1 * torch.randn(shape, device=DEVICE))
    return OnSphere(parameter, parameter.detach(), momentum, splits, name, ON)


def vector(size, name="b"):
    parameter = torch.nn.Parameter(torch.randn(size, device=DEVICE))
    parameter.grad = torch.randn(size, device=DEVICE)
    like = parameter.detach()
    step = torch.zeros((), device=DEVICE)
    return OffSphere(
        parameter, like, torch.zeros_like(like), torch.zeros_like(like), step, name, OFF
    )


def rows(t):
    return t.detach().double().reshape(len(t), -1).clone()


@pytest.mark.parametrize("iterations", [2, 5])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_step_is_that_of_the_reference(kind, iterations):
    torch.manual_seed(0)
    shape, splits, channels_last = WEIGHTS[kind]
    item = matrix(shape, splits, channels_last)
    w, g, m = rows(item.weight), rows(item.parameter.grad), rows(item.momentum)
    before = w.clone()
    u, share = spheres.momentum_(m, w, g, BETA, nesterov=True)
    direction = orthogonalise(u.reshape(splits, -1, u.shape[1]), iterations, gram=True)
    spheres.rotate_(w, direction.reshape(u.shape), LR * share)
    FusedStep([item], [], iterations=iterations).step()
    torch.testing.assert_close(rows(item.momentum), m, rtol=1e-4, atol=1e-5)
    moved = rows(item.weight) - before
    assert (moved - (w - before)).norm() < 0.04 * (w - before).norm()
    torch.testing.assert_close(rows(item.weight).norm(dim=1), before.norm(dim=1), rtol=2e-5, atol=0)


def test_adamw_is_that_of_torch():
    torch.manual_seed(0)
    items = [vector(10), vector(1100)]
    copies = [torch.nn.Parameter(item.weight.clone()) for item in items]
    theirs = torch.optim.AdamW(copies, **OFF)
    ours = FusedStep([], items)
    for _ in range(3):
        for own, item in zip(copies, items, strict=True):
            item.parameter.grad = torch.randn_like(item.weight)
            own.grad = item.parameter.grad.clone()
        theirs.step()
        ours.step()
    for own, item in zip(copies, items, strict=True):
        torch.testing.assert_close(item.weight, own.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", ["matrix", "vector"])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_named_later(bad):
    torch.manual_seed(0)
    on, off = matrix((20, 12), 1, False, "hidden"), vector(10, "bias")
    step = FusedStep([on], [off])
    step.step()
    kept = on.weight.clone(), off.weight.clone()
    broken = (on if bad == "matrix" else off).parameter
    good = broken.grad.clone()
    broken.grad.view(-1)[3] = float("nan")
    step.step()
    broken.grad = good
    step.step()
    assert torch.equal(on.weight, kept[0])
    assert torch.equal(off.weight, kept[1])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(FloatingPointError, match="hidden" if bad == "matrix" else "bias"):
        step.check()
    step.step()
    assert not torch.equal(on.weight, kept[0])
    assert on.weight.isfinite().all()


def test_a_weight_without_gradient_stays():
    torch.manual_seed(0)
    items = [matrix((12, 20), 1, False), matrix((12, 20), 1, False)]
    step = FusedStep(items, [])
    items[0].parameter.grad = None
    kept = items[0].weight.clone(), items[0].momentum.clone()
    step.step()
    assert torch.equal(items[0].weight, kept[0])
    assert torch.equal(items[0].momentum, kept[1])


def test_dense_rows():
    assert has_dense_rows(torch.zeros(4, 3, 2, 2))
    assert has_dense_rows(torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    assert not has_dense_rows(torch.zeros(4, 6)[:, :3])
    assert not has_dense_rows(torch.zeros(4, 6).T)


@gpu
def test_a_replayed_step_follows_gradients_and_rates():
    torch.manual_seed(0)
    one, two = matrix((40, 70), 1, False), matrix((40, 70), 1, False)
    two.weight.copy_(one.weight)
    two.momentum.copy_(one.momentum)
    replayed, eager = FusedStep([one], []), FusedStep([two], [])
    for count in range(6):
        gradient = torch.randn(40, 70, device=DEVICE)
        one.parameter.grad = gradient.clone()
        two.parameter.grad = gradient.clone()
        replayed.step(count + 1)
        eager._eager_steps = 0
        eager.step(count + 1)
        assert torch.equal(one.weight, two.weight)


class Network(torch.nn.Module):
    """A little of everything: convolutions of all groupings, norms, a gain, a head."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
            torch.nn.Conv2d(16, 32, 1, groups=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(32, 48),
            torch.nn.ReLU(),
            torch.nn.Linear(48, 5),
        )

    def forward(self, x):
        return self.layers(x)


def fuse(optimizer):
    """Fused steps on a CPU as well, where kernels are interpreted."""
    return fused_steps(
        optimizer, {torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")}
    )


def train(network, steps, dtype=torch.float32, **options):
    torch.manual_seed(1)
    x = torch.randn(64, 3, 8, 8, device=DEVICE, dtype=dtype)
    y = torch.randint(5, (64,), device=DEVICE)
    optimizer = fisherfold.SphereOptimizer(network, lr=0.02, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x).float(), y).backward()
        optimizer.step()
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_optimizer_takes_the_steps_of_its_reference(monkeypatch, layout, dtype):
    torch.manual_seed(0)
    monkeypatch.setattr(fisherfold.SphereOptimizer, "_fuse", fuse)
    start = Network().to(DEVICE, dtype, memory_format=layout)
    fused, reference = copy.deepcopy(start), copy.deepcopy(start)
    ours = train(fused, 4, dtype, total_steps=6, average=True)
    assert len(ours._fused) == 1
    assert len(ours._fused[0].parameters) == len(list(fused.parameters()))
    monkeypatch.setattr(fisherfold.SphereOptimizer, "_fuse", lambda self: [])
    theirs = train(reference, 4, dtype, total_steps=6, average=True)
    tolerance = 0.1 if dtype == torch.float32 else 0.5
    for a, b, c in zip(fused.parameters(), reference.parameters(), start.parameters(), strict=True):
        a, b, c = a.detach().double(), b.detach().double(), c.detach().double()
        assert (a - b).norm() < tolerance * (b - c).norm() + 1e-6
    mine, other = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert {k: {n: t.shape for n, t in v.items()} for k, v in mine.items()} == {
        k: {n: t.shape for n, t in v.items()} for k, v in other.items()
    }


@pytest.mark.slow
def test_a_state_goes_from_one_way_to_the_other(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(fisherfold.SphereOptimizer, "_fuse", fuse)
    network = Network().to(DEVICE)
    optimizer = train(network, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(network.state_dict())
    again = Network().to(DEVICE)
    again.load_state_dict(weights)
    other = fisherfold.SphereOptimizer(again, lr=0.02)
    other.load_state_dict(saved)
    for net, opt in ((network, optimizer), (again, other)):
        x = torch.ones(8, 3, 8, 8, device=DEVICE)
        opt.zero_grad()
        net.eval()(x).square().mean().backward()
        opt.step()
    for a, b in zip(network.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@gpu
def test_a_step_may_be_captured_by_the_caller():
    torch.manual_seed(0)
    network = Network().to(DEVICE)
    optimizer = train(network, 2)
    x = torch.randn(64, 3, 8, 8, device=DEVICE)
    y = torch.randint(5, (64,), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()

    def capture():
        with torch.cuda.graph(graph):
            loss = torch.nn.functional.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
        return loss

    with pytest.warns(UserWarning, match="captured"):
        loss = capture()
    graph.replay()
    first = float(loss.detach())
    for _ in range(40):
        graph.replay()
    assert float(loss.detach()) < 0.8 * first
