"""Kronecker factors against the exact Fisher matrix, against curvlinops, and under all that changes their scale."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fisherfold.optim.curvature import LayerCurvature
from fisherfold.optim.factors import Collector, FactorSums, input_rows, output_rows
from fisherfold.optim.kfac import KFAC
from fisherfold.optim.mkfac import MKFAC
from fisherfold.optim.tracking import track

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch on even kernels

LAYERS = {
    "linear": (lambda: nn.Linear(7, 6, bias=False), (7,)),
    "linear-sequence": (lambda: nn.Linear(7, 6, bias=False), (5, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 6, 3, padding=1, bias=False), (3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, padding=1, bias=False), (3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2, bias=False), (2, 4, 4, 4)),
    "strided": (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), (3, 7, 7)),
    "dilated": (lambda: nn.Conv2d(3, 6, 3, dilation=2, padding=2, bias=False), (3, 7, 7)),
    "rectangular": (lambda: nn.Conv2d(3, 6, (3, 1), stride=(1, 2), padding=(2, 0), bias=False), (3, 6, 6)),
    "same": (lambda: nn.Conv2d(3, 6, 4, padding="same", bias=False), (3, 6, 6)),
    "valid": (lambda: nn.Conv2d(3, 6, 3, padding="valid", bias=False), (3, 6, 6)),
    "reflect": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect", bias=False), (3, 6, 6)),
    "circular": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular", bias=False), (3, 6, 6)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False), (4, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6, padding=1, bias=False), (6, 6, 6)),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_rows_rebuild_output_and_gradient(name: str) -> None:
    """s = W a row by row, and ∇W = Σ g aᵀ: whatever the stride, dilation, padding and groups."""
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    layer = build().double()
    x = torch.randn(4, *shape, dtype=torch.float64)
    output = layer(x)
    rows, weight = input_rows(layer, x)
    groups = getattr(layer, "groups", 1)
    assert weight == pytest.approx(1 / groups)
    weights = layer.weight.reshape(groups, -1, rows.shape[1])
    rebuilt = torch.einsum("rgn,gmn->rgm", rows.reshape(-1, groups, rows.shape[1]), weights).flatten(1)
    torch.testing.assert_close(rebuilt, output_rows(layer, output))
    cotangent = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, layer.weight, cotangent)
    g = output_rows(layer, cotangent).reshape(len(rebuilt), groups, -1)
    summed = torch.einsum("rgm,rgn->gmn", g, rows.reshape(-1, groups, rows.shape[1]))
    torch.testing.assert_close(summed.reshape(gradient.shape), gradient)


def test_rows_of_channels_last_and_unbatched_inputs() -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 5, 5)
    rows, _ = input_rows(layer, x)
    torch.testing.assert_close(input_rows(layer, x.to(memory_format=torch.channels_last))[0], rows)
    torch.testing.assert_close(input_rows(layer, x[0])[0], rows[:25])


def test_thinned_rows_cover_all_positions_in_turn_and_keep_the_scale() -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x = torch.randn(2, 2, 12, 12, dtype=torch.float64)
    full, _ = input_rows(layer, x)
    total = torch.zeros(18, 18, dtype=torch.float64)
    phases = 8
    for phase in range(phases):
        rows, weight = input_rows(layer, x, max_rows=40, phase=phase)  # 288 rows: a grid of spacings 4 and 2
        assert len(rows) == 36
        assert weight == pytest.approx(8)
        total += weight * rows.T @ rows / phases
    torch.testing.assert_close(total, full.T @ full)


@pytest.mark.parametrize("shape", [(4, 2, 1, 64), (4, 2, 64, 1), (64, 2, 1, 1), (16, 2, 2, 8)])
def test_no_grid_of_thinned_rows_is_without_rows(shape: tuple[int, ...]) -> None:
    """Signals as images of one row, and maps of one place: the other axis and then the samples are thinned out."""
    torch.manual_seed(0)
    layer, phases = nn.Conv2d(2, 3, 1, bias=False), 16
    x, weights = torch.randn(shape, dtype=torch.float64), torch.rand(shape[0], dtype=torch.float64)
    full, each = input_rows(layer, x, weights=weights)
    plain, weighted = torch.zeros(2, 2, 2, dtype=torch.float64)
    for phase in range(phases):
        rows, scale = input_rows(layer, x, max_rows=16, phase=phase)
        kept, scales = input_rows(layer, x, max_rows=16, phase=phase, weights=weights)
        assert torch.equal(kept, rows)
        assert len(rows) == 16
        plain += scale * rows.T @ rows / phases
        weighted += torch.einsum("ri,r,rj->ij", kept, scales, kept) / phases
    torch.testing.assert_close(plain, full.T @ full)
    torch.testing.assert_close(weighted, torch.einsum("ri,r,rj->ij", full, each, full))


def test_curvature_of_signals_is_there_on_every_grid() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, (1, 5)), nn.Flatten(), nn.LazyLinear(3))
    x, y = torch.randn(32, 2, 1, 1000), torch.randint(3, (32,))
    model(x)
    full, thinned = KFAC(model, max_rows=None), KFAC(model)
    full.refresh([(x, y)], nn.CrossEntropyLoss())
    for _ in range(5):
        thinned.refresh([(x, y)], nn.CrossEntropyLoss())
        expected, seen = (optimizer.curvature.layers["0.weight"].a for optimizer in (full, thinned))
        assert expected is not None
        assert seen is not None
        assert float(torch.trace(seen)) == pytest.approx(float(torch.trace(expected)), rel=0.05)


def exact_trace(model: nn.Module, weight: nn.Parameter, x: Tensor) -> float:
    """The trace of the Fisher block, (1/N) Σ_n tr(J_nᵀ (diag p - ppᵀ) J_n), by torch.func."""
    name = next(key for key, p in model.named_parameters() if p is weight)

    def logits(w: Tensor, one: Tensor) -> Tensor:
        return torch.func.functional_call(model, {name: w}, (one[None],))[0]

    jacobians = torch.func.vmap(torch.func.jacrev(logits), (None, 0))(weight.detach(), x).flatten(2)
    p = model(x).detach().softmax(dim=1)
    metric = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return float(torch.einsum("nci,ncd,ndi->n", jacobians, metric, jacobians).mean().detach())


@pytest.mark.parametrize("name", list(LAYERS))
def test_scale_is_that_of_the_exact_fisher(name: str) -> None:
    """tr(A) tr(G) within 6 % of the exact trace; random inputs, labels drawn from the model many times."""
    torch.manual_seed(1)
    build, shape = LAYERS[name]
    layer = build()
    x = torch.randn(256, *shape)
    width = layer(x).flatten(1).shape[1]
    model = nn.Sequential(layer, nn.Flatten(), nn.ReLU(), nn.Linear(width, 4)).double()
    x = x.double()
    optimizer = MKFAC(model, invariant={"0.weight": "row"}, fisher="mc", damping=1.0, max_rows=None)
    optimizer.refresh([(x, torch.zeros(256, dtype=torch.long))] * 20, nn.CrossEntropyLoss())
    layer_curvature = optimizer.curvature.layers["0.weight"]
    trace = float(torch.trace(layer_curvature.a) * torch.trace(layer_curvature.g))
    assert trace == pytest.approx(exact_trace(model, model[0].weight, x), rel=0.06)


def tanh_net(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(2)
    conv = nn.Conv2d(2, 5, 3, stride=2, padding=1, bias=bias)
    return nn.Sequential(
        conv, nn.Tanh(), nn.Flatten(), nn.Linear(45, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias)
    ).double()


def collect(
    model: nn.Module, x: Tensor, y: Tensor, *, joined: bool = False, **options: object
) -> dict[str, tuple[Tensor, Tensor]]:
    optimizer = KFAC(model, damping=1.0, max_rows=None, **options)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss(reduction=optimizer.reduction))
    return {name: (layer.a, layer.g) for name, layer in optimizer.curvature.layers.items()}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_factors_equal_those_of_curvlinops() -> None:
    peers = pytest.importorskip("curvlinops")
    model = tanh_net()
    x, y = torch.randn(12, 2, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    parameters = [p for p in model.parameters() if p.requires_grad]
    peer = peers.KFACLinearOperator(
        model, nn.CrossEntropyLoss(), parameters, [(x, y)], fisher_type="empirical", separate_weight_and_bias=False
    )
    ours = collect(model, x, y)
    assert peer._input_covariances  # filled when it checked that it is deterministic
    for layer in ("0", "3", "5"):
        a, g = ours[f"{layer}.weight"]
        their_a, their_g = peer._input_covariances[layer], peer._gradient_covariances[layer]
        # they divide A by the number of positions and multiply G by it: only the product has a meaning
        torch.testing.assert_close(their_a * torch.trace(their_g), a * torch.trace(g))
        torch.testing.assert_close(their_g * torch.trace(their_a), g * torch.trace(a))


def test_kfac_is_exact_for_deep_linear_networks() -> None:
    """With a Gaussian likelihood and a linear network, A ⊗ G is the exact Fisher block of every layer."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in ((4, 5), (5, 3), (3, 2)))).double()
    x = torch.randn(10, 4, dtype=torch.float64)
    z = model(x).detach()
    outputs = z.shape[1]
    # residuals that run through ±√C e_c have exactly the covariance of the unit Gaussian
    signs = [(s * outputs**0.5) * torch.eye(outputs, dtype=torch.float64)[c] for c in range(outputs) for s in (1, -1)]
    optimizer = KFAC(model, damping=1.0, reduction="sum")

    def half_squares(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output - target).square().sum()

    optimizer.refresh([(x, z + residual) for residual in signs], half_squares)
    for index, layer in enumerate(model):
        jacobian = torch.func.jacrev(lambda w, i=index: torch.func.functional_call(model, {f"{i}.weight": w}, (x,)))
        rows = jacobian(layer.weight.detach()).flatten(2)  # samples, outputs, entries of W
        exact = torch.einsum("nci,ncj->ij", rows, rows) / len(x)
        state = optimizer.curvature.layers[f"{index}.weight"]
        # D counts the entries of the residual, so that A carries a factor 1/C
        torch.testing.assert_close(torch.kron(state.g, state.a), exact / outputs)


def test_reduction_accumulation_and_loss_scale_do_not_change_the_factors() -> None:
    model = tanh_net()
    x, y = torch.randn(12, 2, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    reference = collect(model, x, y)
    summed = collect(model, x, y, reduction="sum")
    accumulated = KFAC(model, damping=1.0)
    with accumulated.statistics(accumulation=3):
        for part in range(3):
            piece = slice(4 * part, 4 * part + 4)
            (F.cross_entropy(model(x[piece]), y[piece]) / 3).backward()

    class Scaler:
        def get_scale(self) -> float:
            return 1024.0

    scaled = KFAC(model, damping=1.0)
    with scaled.statistics(grad_scaler=Scaler()):
        (1024 * F.cross_entropy(model(x), y)).backward()
    for name, (a, g) in reference.items():
        torch.testing.assert_close(summed[name], (a, g))
        for optimizer in (accumulated, scaled):
            layer = optimizer.curvature.layers[name]
            torch.testing.assert_close((layer.a / layer.mass, layer.g / layer.mass), (a, g))


def test_ignored_targets_count_neither_as_samples_nor_as_gradients() -> None:
    """Half of the targets ignored: A keeps its rows, the gradient scale follows the loss's own count."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    masked = y.clone()
    masked[4:] = -100
    a_all, g_all = collect(model, x, masked)["2.weight"]
    a_half, g_half = collect(model, x[:4], y[:4])["2.weight"]
    trace_all = torch.trace(g_all) * torch.trace(a_all)
    # R doubles with silent rows: G halves, A (over D = 4) holds twice the rows
    torch.testing.assert_close(2 * g_all, g_half)
    assert float(trace_all) == pytest.approx(float(torch.trace(a_half) * torch.trace(g_half)), rel=0.6)
    hidden = model[1](model[0](x)).detach()
    hidden = torch.cat([hidden, torch.ones(8, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(a_all, hidden.T @ hidden / 4)


@pytest.mark.parametrize("fisher", ["empirical", "persample"])
def test_a_sample_of_weight_three_is_three_samples(fisher: str) -> None:
    model = tanh_net()
    x, y = torch.randn(12, 2, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    weight = torch.tensor([1, 0, 3])
    weighted, repeated = (KFAC(model, damping=1.0, max_rows=None, fisher=fisher) for _ in range(2))
    weighted.refresh([(x[:5], y[:5]), (x[5:], y[5:])], nn.CrossEntropyLoss(weight.double()))
    repeated.refresh([(x.repeat_interleave(weight[y], 0), y.repeat_interleave(weight[y]))], nn.CrossEntropyLoss())
    log_likelihood = KFAC(nn.Sequential(model, nn.LogSoftmax(1)), damping=1.0, max_rows=None, fisher=fisher)
    log_likelihood.refresh([(x, y)], nn.NLLLoss(weight.double()))
    for name, layer in repeated.curvature.layers.items():
        for other in (weighted.curvature.layers[name], log_likelihood.curvature.layers[f"0.{name}"]):
            torch.testing.assert_close((other.a, other.g), (layer.a, layer.g))


WEIGHTED = {
    "classes": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 4.0])), "hard"),
    "zero": (nn.CrossEntropyLoss(torch.tensor([0.5, 0.0, 4.0])), "hard"),
    "sum": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 4.0]), reduction="sum"), "hard"),
    "smoothed": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 4.0]), label_smoothing=0.3), "hard"),
    "soft": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 4.0])), "soft"),
    "soft-smoothed": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 4.0]), label_smoothing=0.3), "soft"),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([5.0])), "binary"),
    "binary-weighted": (nn.BCEWithLogitsLoss(torch.tensor([0.3]), pos_weight=torch.tensor([5.0])), "binary"),
}


@pytest.mark.parametrize("name", list(WEIGHTED))
def test_factors_of_weighted_losses_equal_the_dense_fisher_matrix(name: str) -> None:
    """At W = 0 all outputs have one distribution, and A ⊗ G is exact; the model is linear, so F is the Hessian."""
    torch.manual_seed(13)
    loss_fn, kind = WEIGHTED[name]
    x, outputs = torch.randn(10, 4, dtype=torch.float64), 1 if kind == "binary" else 3
    y = {
        "hard": torch.randint(3, (10,)),
        "soft": torch.rand(10, 3, dtype=torch.float64).softmax(1),
        "binary": torch.randint(2, (10, 1)).double(),
    }[kind]
    model = nn.Linear(4, outputs, bias=False).double()
    nn.init.zeros_(model.weight)
    optimizer = KFAC(model, damping=1.0, fisher="mc", max_rows=None, reduction=loss_fn.reduction)
    every_class = iter(range(max(outputs, 2)))  # each is drawn once: the mean over uniform draws

    def draw(z: Tensor, targets: Tensor, _: torch.Generator) -> Tensor:
        drawn = torch.full((10,), next(every_class))
        return drawn[:, None].double() if kind == "binary" else drawn

    loss_fn = loss_fn.double()
    optimizer.refresh([(x, y)] * max(outputs, 2), loss_fn, sampler=draw)
    exact = torch.autograd.functional.hessian(lambda w: loss_fn(x @ w.T, y), model.weight.detach())
    exact = exact.reshape(4 * outputs, -1)
    if loss_fn.reduction == "sum":  # factors are those of the mean
        exact = exact / loss_fn.weight[y].sum()
    state = optimizer.curvature.layers["weight"]
    torch.testing.assert_close(torch.kron(state.g, state.a), exact)


@pytest.mark.parametrize("fisher", ["empirical", "mc", "persample"])
def test_equal_class_weights_change_nothing_where_targets_are_ignored_or_have_places(fisher: str) -> None:
    torch.manual_seed(14)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x, y = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.randint(-1, 3, (6, 5, 5))
    y[0] = -1
    plain, weighted = (KFAC(model, damping=1.0, fisher=fisher, seed=3) for _ in range(2))
    plain.refresh([(x, y)], nn.CrossEntropyLoss(ignore_index=-1))
    weighted.refresh([(x, y)], nn.CrossEntropyLoss(torch.full((3,), 7.0, dtype=torch.float64), ignore_index=-1))
    for name, layer in plain.curvature.layers.items():
        other = weighted.curvature.layers[name]
        torch.testing.assert_close((other.a, other.g), (layer.a, layer.g))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_smoothed_targets_leave_those_that_the_model_draws_alone(reduction: str) -> None:
    """The curvature of a cross entropy does not depend on its targets, smoothed or not."""
    torch.manual_seed(16)
    model = tanh_net()
    x, y = torch.randn(12, 2, 6, 6, dtype=torch.float64), torch.randint(-1, 3, (12,))
    plain, smoothed = (KFAC(model, damping=1.0, fisher="mc", reduction=reduction, seed=3) for _ in range(2))
    plain.refresh([(x, y)], nn.CrossEntropyLoss(ignore_index=-1, reduction=reduction))
    smoothed.refresh([(x, y)], nn.CrossEntropyLoss(ignore_index=-1, reduction=reduction, label_smoothing=0.3))
    for name, layer in plain.curvature.layers.items():
        other = smoothed.curvature.layers[name]
        torch.testing.assert_close((other.a, other.g), (layer.a, layer.g))


def test_a_loss_with_weights_of_the_size_of_the_batch_is_no_error() -> None:
    torch.manual_seed(17)
    model, x = nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=torch.float64)
    y, weight = torch.rand(6, 2, dtype=torch.float64), torch.full((6, 2), 2.0, dtype=torch.float64)
    plain, weighted = (KFAC(model, damping=1.0) for _ in range(2))
    plain.refresh([(x, y)], nn.BCEWithLogitsLoss())
    weighted.refresh([(x, y)], nn.BCEWithLogitsLoss(weight))
    layers = (optimizer.curvature.layers["weight"] for optimizer in (plain, weighted))
    one, two = (torch.kron(layer.g, layer.a) for layer in layers)
    torch.testing.assert_close(two, 2 * one)


def test_a_loss_that_is_derived_from_a_weighted_one_is_taken_as_it_is() -> None:
    class Doubled(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return 2 * F.cross_entropy(input, target)

    model = tanh_net()
    x, y = torch.randn(12, 2, 6, 6, dtype=torch.float64), torch.randint(3, (12,))
    optimizer = KFAC(model, damping=1.0, max_rows=None)
    optimizer.refresh([(x, y)], Doubled(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)))
    for name, (a, g) in collect(model, x, y).items():
        layer = optimizer.curvature.layers[name]
        torch.testing.assert_close((layer.a, layer.g), (a, 4 * g))


def test_weights_are_of_samples_where_rows_are_thinned_out() -> None:
    """The mean over all grids is the whole."""
    torch.manual_seed(15)
    weights = torch.rand(4)
    layers = {nn.Linear(3, 2): torch.randn(4, 16, 3), nn.Conv2d(2, 2, 1, groups=2): torch.randn(4, 2, 4, 4)}
    for layer, x in layers.items():
        (rows, scale), thinned = input_rows(layer, x, weights=weights), []
        whole = (rows.T * scale) @ rows
        for phase in range(4):
            kept, each = input_rows(layer, x, max_rows=16, phase=phase, weights=weights)
            assert len(kept) < len(rows)
            thinned.append((kept.T * each) @ kept)
        torch.testing.assert_close(torch.stack(thinned).mean(0), whole)


def test_shared_module_and_tied_weight_add_up_over_uses() -> None:
    torch.manual_seed(4)
    layer = nn.Linear(4, 4, bias=False)
    shared = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 3)).double()
    tied = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    tied[2].weight = tied[0].weight
    tied.load_state_dict({**shared.state_dict(), "2.weight": shared[0].weight})
    x, y = torch.randn(64, 4, dtype=torch.float64), torch.randint(3, (64,))
    a, g = collect(shared, x, y)["0.weight"]
    torch.testing.assert_close(collect(tied, x, y)["0.weight"], (a, g))
    first = torch.tanh(layer(x)).detach()
    torch.testing.assert_close(a, (x.T @ x + first.T @ first) / 64)
    separate = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    separate.load_state_dict(tied.state_dict())
    parts = collect(separate, x, y)
    torch.testing.assert_close(g, (parts["0.weight"][1] + parts["2.weight"][1]) / 2)


def test_per_sample_factors_are_the_true_ones_under_batch_norm() -> None:
    """True per-sample gradients, those of ψ_n(θ) with the batch's statistics moving along, are tangent."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(16, 5, dtype=torch.float64), torch.randint(3, (16,))
    optimizer = MKFAC(model, example_input=x, fisher="persample", damping=1.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    state = optimizer.curvature.layers["0.weight"]
    losses = F.cross_entropy(model(x), y, reduction="none")
    true = torch.stack([torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0] for loss in losses])
    assert float(torch.trace(state.a) * torch.trace(state.g)) == pytest.approx(
        float(true.square().sum() / 16), rel=1e-9
    )
    outer = torch.einsum("nij,nik->jk", true, true)
    torch.testing.assert_close(state.a / torch.trace(state.a), outer / torch.trace(outer))
    radial = torch.einsum("nij,ij->ni", true, model[0].weight.detach())
    assert float(radial.norm() / true.norm()) < 1e-4  # the ε of batch norm


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["values", "places", "ignored"])
def test_per_sample_factors_have_the_terms_of_the_loss(kind: str, reduction: str) -> None:
    """tr F = (1/D) Σ_n ‖∇ Σ ℓ_n‖² over the D terms of all samples, which are those of the other Fisher matrices."""
    torch.manual_seed(21)
    x = torch.randn(6, 4, 5, dtype=torch.float64)
    model = nn.Sequential(nn.Conv1d(4, 3, 5 if kind == "values" else 1), nn.Flatten(2 if kind == "places" else 1))
    model = model.double()
    y = torch.randn(6, 3, dtype=torch.float64) if kind == "values" else torch.randint(3, (6, 5))
    loss_fn: nn.Module = nn.CrossEntropyLoss(reduction=reduction)
    if kind == "values":
        loss_fn = nn.MSELoss(reduction=reduction)
    if kind == "ignored":
        model, y = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)).double(), y[:, 0]
        y[2:] = -100
    squares, terms = 0.0, y.numel() if kind != "ignored" else 2
    for sample, target in zip(x[: 2 if kind == "ignored" else 6], y, strict=False):
        each = F.mse_loss if kind == "values" else F.cross_entropy
        loss = each(model(sample[None]), target[None], reduction="sum")
        squares += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(model.parameters())))
    optimizer = KFAC(model, damping=1.0, fisher="persample", reduction=reduction)
    optimizer.refresh([(x, y)], loss_fn)
    (layer,) = optimizer.curvature.layers.values()
    assert float(torch.trace(layer.a) * torch.trace(layer.g)) == pytest.approx(squares / terms, rel=1e-9)
    other = KFAC(model, damping=1.0, fisher="persample", reduction="sum" if reduction == "mean" else "mean")
    with pytest.raises(ValueError, match="the loss is not reduced as declared"):
        other.refresh([(x, y)], loss_fn)


def test_monte_carlo_targets_follow_the_predictive_distribution() -> None:
    """For a Linear softmax model G is E[diag p - ppᵀ]."""
    torch.manual_seed(6)
    model = nn.Linear(4, 3, bias=False).double()
    x = torch.randn(4000, 4, dtype=torch.float64)
    optimizer = KFAC(model, damping=1.0, fisher="mc", max_rows=None)
    state = torch.get_rng_state()
    optimizer.refresh([(x, torch.zeros(4000, dtype=torch.long))] * 10, nn.CrossEntropyLoss())
    assert torch.equal(torch.get_rng_state(), state)
    p = model(x).detach().softmax(dim=1)
    expected = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(dim=0)
    torch.testing.assert_close(optimizer.curvature.layers["weight"].g, expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), F.mse_loss])
def test_monte_carlo_regression_has_the_variance_of_its_loss(loss_fn: object) -> None:
    torch.manual_seed(7)
    model = nn.Linear(4, 2, bias=False).double()
    x = torch.randn(3000, 4, dtype=torch.float64)
    optimizer = KFAC(model, damping=1.0, fisher="mc", max_rows=None)
    optimizer.refresh([(x, torch.zeros(3000, 2, dtype=torch.float64))] * 10, loss_fn)
    # ∂(z-y)²/∂z = 2(z-y) with variance ½: the Fisher of an entry is 2
    torch.testing.assert_close(
        optimizer.curvature.layers["weight"].g, 2 * torch.eye(2, dtype=torch.float64), atol=0.06, rtol=0
    )


def test_running_mean_is_free_of_the_bias_of_its_start() -> None:
    model = nn.Linear(4, 3, bias=False).double()
    x, y = torch.randn(32, 4, dtype=torch.float64), torch.randint(3, (32,))
    optimizer = KFAC(model, damping=1.0, factor_decay=0.9)
    reference = collect(model, x, y)["weight"]
    for _ in range(3):
        with optimizer.statistics():
            F.cross_entropy(model(x), y).backward()
        layer = optimizer.curvature.layers["weight"]
        torch.testing.assert_close((layer.a / layer.mass, layer.g / layer.mass), reference)


def test_hooks_survive_in_place_activations_and_leave_no_trace() -> None:
    torch.manual_seed(8)
    x, y = torch.randn(12, 2, 6, 6, dtype=torch.float64), torch.randint(3, (12,))

    def net(inplace: bool) -> nn.Module:
        torch.manual_seed(9)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(inplace),
            nn.Flatten(),
            nn.Linear(16, 3),
        ).double()

    plain, inplace = net(False), net(True)
    for name, factors in collect(plain, x, y).items():
        torch.testing.assert_close(collect(inplace, x, y)[name], factors)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in inplace.modules())
    assert all(p.grad is None for p in inplace.parameters())


def test_hooks_of_the_user_are_part_of_what_follows_the_layer() -> None:
    """A layer whose output a hook multiplies has the factors of the layer before a multiplication."""
    x, y, found = torch.randn(32, 5), torch.randint(3, (32,)), []
    for hooked in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(5, 3)
        if hooked:
            layer.register_forward_hook(lambda _module, _inputs, output: 3 * output)
        optimizer = KFAC(nn.Sequential(layer), max_rows=None)
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss() if hooked else lambda z, t: F.cross_entropy(3 * z, t))
        found.append(optimizer.curvature.layers["0.weight"])
    torch.testing.assert_close(found[0].g, found[1].g)
    torch.testing.assert_close(found[0].a, found[1].a)


def test_bf16_autocast_accumulates_in_float32() -> None:
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    optimizer = MKFAC(model, example_input=x, damping=1.0)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    full = {name: (layer.a.clone(), layer.g.clone()) for name, layer in optimizer.curvature.layers.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    for name, layer in optimizer.curvature.layers.items():
        assert layer.a.dtype == layer.g.dtype == torch.float32
        torch.testing.assert_close(layer.a, full[name][0], atol=0, rtol=1e-6 if name == "0.weight" else 0.05)
        assert float((layer.g - full[name][1]).norm() / full[name][1].norm()) < 0.05


def test_use_without_gradient_counts_for_neither_factor() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(2 * x).detach()

    model = Detached().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    a, _ = collect(model, x, torch.randint(3, (8,)))["layer.weight"]
    rows = torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(a, rows.T @ rows / 8)


def test_what_can_be_tracked() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.free = nn.Parameter(torch.randn(3, 3))

    model = Tied()
    wanted = {id(p): name for name, p in model.named_parameters()}
    tracked, refused = track(model, wanted)
    assert tracked == []
    assert refused == {
        "embedding.weight": "first order: a parameter of Embedding, Linear",
        "free": "first order: a parameter of Tied",
    }


class WithEmptyLayers(nn.Module):
    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        self.full, self.no_inputs, self.no_outputs = full, nn.Linear(0, 3, bias=False), nn.Linear(4, 0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.full(x) + self.no_inputs(x[:, :0]) + self.no_outputs(x).sum()
        return found


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_entries_have_no_curvature_and_disturb_nothing() -> None:
    torch.manual_seed(0)
    full, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    plain, model = KFAC(full), KFAC(WithEmptyLayers(full))
    for opt in (plain, model):
        opt.refresh([(x, y)], nn.CrossEntropyLoss())
    torch.testing.assert_close(collected(model), collected(plain))
    assert model.refused == {f"{name}.weight": "first order: it is empty" for name in ("no_inputs", "no_outputs")}


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.flatten(1)
        rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
        return F.conv2d(x, rows.view_as(self.weight), self.bias, self.stride, self.padding)


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class Cast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).to(x.dtype)


def test_layers_of_derived_classes_have_curvature_where_they_are_products() -> None:
    """The factors of a layer that multiplies in narrower numbers are those of a plain one, up to rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(Standardised(2, 4, 3), nn.ReLU(), Padded(4, 4, 3, stride=2), nn.Flatten(), Cast(36, 3))
    plain = nn.Linear(36, 3)
    plain.load_state_dict(net[4].state_dict())
    x, y = torch.randn(16, 2, 8, 8), torch.randint(3, (16,))
    found = []
    for model in (net, nn.Sequential(*net[:4], plain)):
        optimizer = KFAC(model, max_rows=None)
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
        assert [n for n, layer in optimizer.curvature.layers.items() if layer.inverse is not None] == ["4.weight"]
        assert optimizer.report().count("is no product") == 2
        found.append(optimizer.curvature.layers["4.weight"])
    torch.testing.assert_close(found[0].a, found[1].a)
    torch.testing.assert_close(found[0].g, found[1].g, rtol=0.02, atol=1e-3)


def test_networks_whose_layers_all_standardise_their_weights_go_on_without_curvature() -> None:
    """As those without batch norms do: there is nothing to collect, and nobody has made a mistake."""
    torch.manual_seed(0)
    net = nn.Sequential(Standardised(2, 4, 3), nn.ReLU(), Standardised(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    x, y = torch.randn(16, 2, 8, 8), torch.randint(3, (16,))
    optimizer = MKFAC(net, lr=0.01, manifold_lr=0.01, example_input=x)

    def backward(*, collects: bool) -> float:
        optimizer.zero_grad()
        with optimizer.statistics(enabled=collects):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
        return loss.item()

    said = r"does not multiply their input by their weight \(0.weight for one\)"
    with pytest.warns(UserWarning, match=said):
        optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    with pytest.warns(UserWarning, match=said):
        before = backward(collects=True)
    optimizer.step()
    assert backward(collects=False) < before
    with pytest.raises(RuntimeError, match="no curvature was collected: no backward pass"), optimizer.statistics():
        x.square()


def test_a_function_in_the_place_of_a_forward_is_looked_at() -> None:
    """As scripts put it there: one that hands on the product has its factors, another none."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    plain = KFAC(copy.deepcopy(net))
    plain.refresh([(x, y)], nn.CrossEntropyLoss())
    handed_on, scaled = net[0].forward, net[2].forward
    net[0].forward = lambda given: handed_on(given)  # type: ignore[method-assign]
    optimizer = KFAC(net)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    for name, layer in optimizer.curvature.layers.items():
        torch.testing.assert_close(layer.g, plain.curvature.layers[name].g)
    net[2].forward = lambda given: 3 * scaled(given)  # type: ignore[method-assign]
    optimizer = KFAC(net)
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    assert optimizer.curvature.layers["2.weight"].inverse is None
    assert optimizer.curvature.layers["0.weight"].inverse is not None
    assert optimizer.report().count("is no product") == 1


def test_collector_is_empty_without_backward() -> None:
    model = nn.Linear(3, 2)
    tracked, _ = track(model, {id(model.weight): "weight"})
    with Collector(model, tracked, max_rows=None, allow_tf32=True, calls={}) as collector:
        model(torch.randn(2, 3))
    assert collector.sums == {}


def test_per_sample_sums_only_fix_the_product_of_scales() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    a, g = FactorSums(8 * eye, 8 * eye, samples=4, rows=4, paired=True).finish()
    assert float(torch.trace(a) * torch.trace(g)) == pytest.approx(4.0)  # the exact trace is 16/4


def test_wide_factors_are_formed_in_blocks() -> None:
    """Orders from four blocks on: the upper triangle is computed, the rest mirrored; equal to the plain product."""
    torch.manual_seed(11)
    model = nn.Linear(500, 400, bias=False).double()
    x = torch.randn(30, 500, dtype=torch.float64)
    a, g = collect(model, x, torch.randint(400, (30,)))["weight"]
    torch.testing.assert_close(a, x.T @ x / 30)
    torch.testing.assert_close(g, g.T)
    assert float(torch.linalg.eigvalsh(g)[0]) > -1e-12


class Autoencoder(nn.Module):
    """Called as a whole, by its parts, with a batch in a dictionary or with samples in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.decoder = nn.Linear(3, 4)

    def forward(self, x: Any) -> Tensor:
        x = x["x"] if isinstance(x, dict) else torch.stack(x) if isinstance(x, list) else x
        return self.decoder(self.encoder(x).tanh())


def collected(opt: KFAC) -> list[Tensor]:
    return [t / layer.mass for layer in opt.curvature.layers.values() for t in (layer.a, layer.g) if t is not None]


def collected_by_name(opt: KFAC) -> dict[str, tuple[Tensor, Tensor]]:
    layers = opt.curvature.layers.items()
    return {n: (la.a / la.mass, la.g / la.mass) for n, la in layers if la.a is not None and la.g is not None}


@pytest.mark.parametrize("way", ["parts", "dictionary", "list"])
def test_samples_are_counted_however_the_model_is_called(way: str) -> None:
    torch.manual_seed(0)
    net = Autoencoder().double()
    batches = torch.randn(2, 10, 4, dtype=torch.float64)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "whole": net,
        "parts": lambda x: net.decoder(net.encoder(x).tanh()),
        "dictionary": lambda x: net({"x": x}),
        "list": lambda x: net(list(x)),
    }
    found = []
    for run in (ways["whole"], ways[way]):
        opt = KFAC(net)
        with opt.statistics(accumulation=2):
            for x in batches:
                (F.mse_loss(run(x), x) / 2).backward()
        found.append(collected(opt))
    assert len(found[1]) == 4
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_a_checkpoint_computes_again_begin_no_pass(reentrant: bool) -> None:
    """Parts of a model are called, on batches of different sizes: the first layer of each tells how large it is."""
    torch.manual_seed(0)
    net = Autoencoder().double()
    batches = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (10, 6, 14)]
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: net.decoder(net.encoder(x).tanh()),
        lambda x: net.decoder(checkpoint(lambda t: net.encoder(t).tanh(), x, use_reentrant=reentrant)),
    ]
    found = []
    for run in ways:
        opt = KFAC(net)
        with opt.statistics():
            for x in batches:
                F.mse_loss(run(x), x.detach()).backward()
        found.append(collected(opt))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    inputs = torch.cat([F.pad(x.detach(), (0, 1), value=1.0) for x in batches])
    torch.testing.assert_close(found[1][0], inputs.T @ inputs / 30)


@pytest.mark.parametrize("way", ["whole", "parts", "dictionary", "list"])
def test_calls_before_one_backward_pass_are_uses_in_one_loss(way: str) -> None:
    """Two calls on N samples each: L = (1/N) Σ (ℓ + ℓ'), whose Fisher matrix is the sum of two, not their mean."""
    torch.manual_seed(0)
    net = Autoencoder().double()
    x, other = torch.randn(2, 10, 4, dtype=torch.float64)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "whole": net,
        "parts": lambda x: net.decoder(net.encoder(x).tanh()),
        "dictionary": lambda x: net({"x": x}),
        "list": lambda x: net(list(x)),
    }
    opt = KFAC(net)
    with opt.statistics():
        for _ in range(2):  # the mean over two passes is that of one
            first, second = ways[way](x), ways[way](other)
            ((first - x).square().sum(1).mean() + (second - other).square().sum(1).mean()).backward()
    inputs = torch.cat([F.pad(t, (0, 1), value=1.0) for t in (x, other)])
    gradients = 2 * torch.cat([first - x, second - other]).detach()
    a, _, _, g = collected(opt)
    torch.testing.assert_close(a, inputs.T @ inputs / 10)
    torch.testing.assert_close(g, gradients.T @ gradients / 20)


class TwoTasks(nn.Module):
    """One trunk, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 3, bias=False)
        self.heads = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 5, bias=False)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.trunk(x).tanh())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("way", ["one by one", "micro-batches", "one backward pass", "scaled"])
def test_fisher_matrices_of_losses_that_are_added_are_added(way: str, reduction: str) -> None:
    """L = L₁ + L₂, with means over 12 and 6 samples: A ⊗ G with A = (A₁ + A₂)/2, G = G₁ + G₂, the other terms' own."""
    torch.manual_seed(0)
    net = TwoTasks().double()
    data = [(torch.randn(n, 4, dtype=torch.float64), torch.randint(c, (n,))) for n, c in ((12, 2), (6, 5))]
    alone = []
    for task, (x, y) in enumerate(data):
        opt = KFAC(net)
        with opt.statistics():
            F.cross_entropy(net(x, task), y).backward()
        alone.append(collected_by_name(opt))
    parts = 3 if way == "micro-batches" else 1
    pieces = [
        (task, xs, ys)
        for task, (x, y) in enumerate(data)
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True)
    ]
    opt = KFAC(net, reduction=reduction)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if way == "scaled" else None
    with opt.statistics(losses="sum", accumulation=parts, grad_scaler=scaler):
        losses = []
        for task, x, y in pieces:
            loss = F.cross_entropy(net(x, task), y, reduction=reduction) / parts
            losses.append(loss if scaler is None else scaler.scale(loss))
            if way != "one backward pass":
                losses[-1].backward()
        if way == "one backward pass":
            sum(losses).backward()
    found = collected_by_name(opt)
    for task in (0, 1):
        torch.testing.assert_close(found[f"heads.{task}.weight"], alone[task][f"heads.{task}.weight"])
    (a, g), (other_a, other_g) = (entry["trunk.weight"] for entry in alone)
    torch.testing.assert_close(found["trunk.weight"], ((a + other_a) / 2, g + other_g))


def test_backward_passes_are_over_batches_of_one_mean_unless_it_is_said() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    whole, parts = KFAC(net), KFAC(net)
    with whole.statistics():
        F.cross_entropy(net(x), y).backward()
    with parts.statistics():
        for piece in (slice(5), slice(5, 20)):
            F.cross_entropy(net(x[piece]), y[piece]).backward()
    torch.testing.assert_close(collected(parts), collected(whole))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"losses": "total"}, "losses must be one of 'mean', 'sum', got 'total'"),
        ({"accumulation": 0}, r"accumulation must be in \[1, inf\), got 0"),
        ({"samples": 0}, r"samples must be in \[1, inf\), got 0"),
        ({"samples": -5}, r"samples must be in \[1, inf\), got -5"),
    ],
)
def test_what_statistics_are_told_is_checked(given: dict[str, Any], message: str) -> None:
    opt = KFAC(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=message), opt.statistics(**given):
        raise AssertionError


def test_factors_of_losses_of_ones_own_have_the_scale_of_the_loss() -> None:
    """A sum over the outputs of a sample is one term, whatever function says so, and so are shares of classes."""
    torch.manual_seed(0)
    net = nn.Linear(4, 5).double()
    x, y = torch.randn(64, 4, dtype=torch.float64), torch.randn(64, 5, dtype=torch.float64).softmax(1)
    own: list[Callable[..., Tensor]] = [
        lambda z, t: F.cross_entropy(z, t),
        lambda z, t: F.kl_div(z.log_softmax(1), t, reduction="batchmean"),
        lambda z, t: {"loss": F.cross_entropy(z, t["shares"])}["loss"],
    ]
    known = KFAC(net)
    known.refresh([(x, y)], nn.CrossEntropyLoss())
    for loss_fn, targets in zip(own, (y, y, {"shares": y}), strict=True):
        opt = KFAC(net)
        opt.refresh([(x, targets)], loss_fn)
        torch.testing.assert_close(collected(opt), collected(known))
    opt, half = KFAC(net), KFAC(net)
    opt.refresh([(x, y)], lambda z, t: (z - t).square().sum(1).mean())
    half.refresh([(x, y)], nn.MSELoss())
    ratios = [float(s.trace() / t.trace()) for s, t in zip(collected(opt), collected(half), strict=True)]
    assert ratios == pytest.approx([5.0, 1.0])  # the loss is five times as large, and so is its Fisher matrix


@pytest.mark.parametrize("fisher", ["empirical", "mc", "persample"])
@pytest.mark.parametrize("last", [True, False], ids=["classes last", "classes second"])
@pytest.mark.parametrize("classes", [4, 5])
def test_a_sum_over_the_places_of_a_sample_is_one_term(fisher: str, last: bool, classes: int) -> None:
    """The loss is four times as large as the mean over the places that count, and so is its Fisher matrix."""
    torch.manual_seed(0)
    net = nn.Linear(6, classes).double() if last else nn.Conv1d(6, classes, 1).double()
    x, y = torch.randn(16, 5, 6, dtype=torch.float64), torch.randint(classes, (16, 5))
    x = x if last else x.transpose(1, 2)
    y[:, 0] = -100

    def mean(z: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(z.movedim(-1, 1) if last else z, t)

    def sums(z: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(z.movedim(-1, 1) if last else z, t, reduction="sum") / len(t)

    def sampler(z: Tensor, t: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.randint(classes, t.shape, generator=generator)
        return torch.where(t == -100, t, drawn)

    traces = []
    for loss_fn in (mean, sums):
        opt = KFAC(net)
        opt.refresh([(x, y)], loss_fn, fisher=fisher, sampler=sampler if fisher == "mc" else None)
        traces.append(math.prod(float(factor.trace()) for factor in collected(opt)))
    assert traces[1] / traces[0] == pytest.approx(4.0)


@pytest.mark.parametrize("fisher", ["empirical", "mc", "persample"])
@pytest.mark.parametrize("places", [(), (4, 4)])
def test_shares_of_classes_are_one_term_per_place(places: tuple[int, ...], fisher: str) -> None:
    """Also where only some of the batches have them, as with mixed images, and where classes are drawn for them."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 5, 1).double() if places else nn.Linear(3, 5).double()
    x, classes = torch.randn(6, 3, *places, dtype=torch.float64), torch.randint(5, (6, *places))
    shares = F.one_hot(classes, 5).movedim(-1, 1).double()
    found = []
    for targets in ((classes, classes), (shares, shares), (shares, classes), (classes, shares)):
        opt = KFAC(net)
        opt.refresh([(x, y) for y in targets], nn.CrossEntropyLoss(), fisher=fisher)
        found.append(collected(opt))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_ignored_targets_of_a_partial_function_are_not_counted() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    found = []
    for loss_fn in (nn.CrossEntropyLoss(ignore_index=0), partial(F.cross_entropy, ignore_index=0)):
        opt = KFAC(net)
        opt.refresh([(x, y)], loss_fn)
        found.append(collected(opt))
    torch.testing.assert_close(found[0], found[1])


class Experts(nn.Module):
    """Samples go to one of three layers: to the first or the second by the sign of an entry, never to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen, hidden = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            here = (chosen == index).nonzero().flatten()
            hidden = hidden.index_add(0, here, expert(x[here]))
        return self.head(hidden.tanh())


def test_an_expert_without_samples_is_no_failure_and_keeps_its_curvature() -> None:
    torch.manual_seed(0)
    model = Experts().double()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = KFAC(model, damping=0.1, max_rows=None)
    optimizer.refresh([(x, y)], loss_fn)
    kept = optimizer.curvature.layers["experts.1.weight"]
    before = kept.a
    assert before is not None
    below = x.clone()
    below[:, 0] = -below[:, 0].abs()
    for _ in range(4):
        optimizer.refresh([(below, y)], loss_fn)
    assert kept.a is before
    assert kept.failures == 0
    assert optimizer.curvature.layers["experts.2.weight"].a is None
    # the share of samples that an expert gets is in its factor: D counts them all
    rows = torch.cat([x[x[:, 0] > 0], torch.ones(int((x[:, 0] > 0).sum()), 1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(before, rows.T @ rows / len(x))


def test_a_batch_of_no_samples_adds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(6, 4, 5, dtype=torch.float64), torch.randint(3, (6,))
    plain, other = KFAC(model, damping=0.1), KFAC(model, damping=0.1)
    with plain.statistics():
        F.cross_entropy(model(x), y).backward()
    with other.statistics():
        F.cross_entropy(model(x), y).backward()
        model(x[:0]).sum().backward()
    for name, layer in plain.curvature.layers.items():
        torch.testing.assert_close(other.curvature.layers[name].a, layer.a, rtol=0, atol=0)
        torch.testing.assert_close(other.curvature.layers[name].g, layer.g, rtol=0, atol=0)


class LastOfLSTM(nn.Module):
    """A layer before a recurrent one, whose backward pass knows no ``vmap``, and one that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.head = nn.Linear(3, 3), nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.first(x))[0][:, -1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients_through_what_knows_no_vmap_are_taken_one_by_one() -> None:
    torch.manual_seed(0)
    model = LastOfLSTM()
    x, y = torch.randn(6, 4, 3), torch.randint(2, (6,))
    optimizer = KFAC(model, damping=0.1, fisher="persample")
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss())
    layer = optimizer.curvature.layers["first.weight"]
    stack = []
    for sample, label in zip(x, y, strict=True):
        loss = F.cross_entropy(model(sample[None]), label[None])
        weight, bias = torch.autograd.grad(loss, [model.first.weight, model.first.bias])
        stack.append(torch.cat([weight, bias[:, None]], dim=1))
    rows = torch.stack(stack)
    trace = rows.square().sum() / 6
    torch.testing.assert_close(layer.a, torch.einsum("nij,nik->jk", rows, rows) / 6 / trace.sqrt())
    torch.testing.assert_close(layer.g, torch.einsum("nij,nkj->ik", rows, rows) / 6 / trace.sqrt())
    assert all(p.grad is None for p in model.parameters())


def test_per_sample_gradients_are_taken_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    x, y = torch.randn(6, 2, 4, 4), torch.randint(2, (6,))
    full, narrow = (KFAC(model, damping=0.1, fisher="persample") for _ in range(2))
    full.refresh([(x, y)], nn.CrossEntropyLoss())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow.refresh([(x, y)], nn.CrossEntropyLoss())
    for name, layer in full.curvature.layers.items():
        assert layer.g is not None
        torch.testing.assert_close(
            narrow.curvature.layers[name].g, layer.g, rtol=0.05, atol=0.05 * float(layer.g.max())
        )


@pytest.mark.parametrize("name", ["tokens", "entries"])
def test_statistics_that_are_told_the_number_of_terms_agree_with_refresh(name: str) -> None:
    """A mean over tokens, or over the entries of a squared error, has more terms than samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    x = torch.randn(6, 7, 4, dtype=torch.float64)
    y = torch.randint(5, (6, 7)) if name == "tokens" else torch.randn(6, 7, 5, dtype=torch.float64)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        flat = (outputs.flatten(0, 1), targets.flatten(0, 1))
        return F.cross_entropy(*flat) if name == "tokens" else F.mse_loss(*flat)

    counted, told, untold = (KFAC(model, damping=0.1) for _ in range(3))
    counted.refresh([(x, y)], loss_fn)
    with told.statistics(samples=y.numel()):
        loss_fn(model(x), y).backward()
    with untold.statistics():
        loss_fn(model(x), y).backward()
    for key in counted.curvature.layers:
        expected, seen, small = (_trace(optimizer.curvature.layers[key]) for optimizer in (counted, told, untold))
        assert seen == pytest.approx(expected)
        assert small == pytest.approx(expected * len(x) / y.numel())


def _trace(layer: LayerCurvature) -> float:
    assert layer.a is not None
    assert layer.g is not None
    return float(torch.trace(layer.a) * torch.trace(layer.g)) / layer.mass**2
