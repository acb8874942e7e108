"""The fused step against its reference, on a GPU or in Triton's interpreter."""

import os

import pytest
import torch

# before Triton is imported, whose own functions are interpreted as well
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs Triton: pip install triton")

from fisherfold.optim import spheres
from fisherfold.optim.fused import FusedStep, OffSphere, OnSphere, has_dense_rows
from fisherfold.optim.spectral import orthogonalise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR = 0.05
BETA = 0.9
ADAMW = (1e-2, 0.1, 0.9, 0.99, 1e-8)
# shape, number of matrices, channels last
WEIGHTS = {
    "tall": ((48, 3, 3, 3), 1, False),
    "wide, channels last": ((20, 18, 3, 3), 1, True),
    "several tiles": ((70, 90), 1, False),
    "three parts": ((48, 16), 3, False),
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
    return OnSphere(parameter, parameter.detach(), momentum, splits, name)


def vector(size, name="b"):
    parameter = torch.nn.Parameter(torch.randn(size, device=DEVICE))
    parameter.grad = torch.randn(size, device=DEVICE)
    like = parameter.detach()
    step = torch.zeros((), device=DEVICE)
    return OffSphere(parameter, like, torch.zeros_like(like), torch.zeros_like(like), step, name)


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
    FusedStep([item], [], iterations=iterations).step([(LR, BETA)], [])
    torch.testing.assert_close(rows(item.momentum), m, rtol=1e-4, atol=1e-5)
    moved = rows(item.weight) - before
    assert (moved - (w - before)).norm() < 0.04 * (w - before).norm()
    torch.testing.assert_close(rows(item.weight).norm(dim=1), before.norm(dim=1), rtol=2e-5, atol=0)


def test_adamw_is_that_of_torch():
    torch.manual_seed(0)
    items = [vector(10), vector(1100)]
    copies = [torch.nn.Parameter(item.weight.clone()) for item in items]
    rate, decay, *betas, eps = ADAMW
    theirs = torch.optim.AdamW(copies, rate, tuple(betas), eps, decay)
    ours = FusedStep([], items)
    for _ in range(3):
        for copy, item in zip(copies, items, strict=True):
            item.parameter.grad = torch.randn_like(item.weight)
            copy.grad = item.parameter.grad.clone()
        theirs.step()
        ours.step([], [ADAMW] * len(items))
    for copy, item in zip(copies, items, strict=True):
        torch.testing.assert_close(item.weight, copy.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", ["matrix", "vector"])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_named_later(bad):
    torch.manual_seed(0)
    on, off = matrix((20, 12), 1, False, "hidden"), vector(10, "bias")
    step = FusedStep([on], [off])
    step.step([(LR, BETA)], [ADAMW])
    kept = on.weight.clone(), off.weight.clone()
    broken = (on if bad == "matrix" else off).parameter
    good = broken.grad.clone()
    broken.grad.view(-1)[3] = float("nan")
    step.step([(LR, BETA)], [ADAMW])
    broken.grad = good
    step.step([(LR, BETA)], [ADAMW])
    assert torch.equal(on.weight, kept[0])
    assert torch.equal(off.weight, kept[1])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(FloatingPointError, match="hidden" if bad == "matrix" else "bias"):
        step.check()
    step.step([(LR, BETA)], [ADAMW])
    assert not torch.equal(on.weight, kept[0])
    assert on.weight.isfinite().all()


def test_a_weight_without_gradient_stays():
    torch.manual_seed(0)
    items = [matrix((12, 20), 1, False), matrix((12, 20), 1, False)]
    step = FusedStep(items, [])
    index = step.spheres.index(next(s for s in step.spheres if s is items[0]))
    items[0].parameter.grad = None
    kept = items[0].weight.clone(), items[0].momentum.clone()
    step.step([(LR, BETA)] * 2, [])
    assert index in (0, 1)
    assert torch.equal(items[0].weight, kept[0])
    assert torch.equal(items[0].momentum, kept[1])


def test_dense_rows():
    assert has_dense_rows(torch.zeros(4, 3, 2, 2))
    assert has_dense_rows(torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    assert not has_dense_rows(torch.zeros(4, 6)[:, :3])
    assert not has_dense_rows(torch.zeros(4, 6).T)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
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
        rate = 0.02 * (count + 1)
        replayed.step([(rate, BETA)], [])
        eager._eager_steps = 0
        eager.step([(rate, BETA)], [])
        assert torch.equal(one.weight, two.weight)
