"""Factors against the exact Fisher matrix and curvlinops; inverses against dense ones; collection in any loop."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fisherfold.fisher.rows import input_rows, output_rows
from fisherfold.optim import KFAC, MKFAC, SGDG, SphereOptimizer
from fisherfold.optim.curvature.inverse import dense, exact, relative

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch on even kernels

LAYERS = {
    "linear": (lambda: nn.Linear(7, 6, bias=False), (7,)),
    "linear-sequence": (lambda: nn.Linear(7, 6, bias=False), (5, 7)),
    "conv1d": (lambda: nn.Conv1d(3, 6, 3, padding=1, bias=False), (3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, padding=1, bias=False), (3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 6, 2, bias=False), (2, 4, 4, 4)),
    "strided": (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), (3, 7, 7)),
    "dilated": (lambda: nn.Conv2d(3, 6, 3, dilation=2, padding=2, bias=False), (3, 7, 7)),
    "rectangular": (
        lambda: nn.Conv2d(3, 6, (3, 1), stride=(1, 2), padding=(2, 0), bias=False),
        (3, 6, 6),
    ),
    "same": (lambda: nn.Conv2d(3, 6, 4, padding="same", bias=False), (3, 6, 6)),
    "valid": (lambda: nn.Conv2d(3, 6, 3, padding="valid", bias=False), (3, 6, 6)),
    "reflect": (
        lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect", bias=False),
        (3, 6, 6),
    ),
    "circular": (
        lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular", bias=False),
        (3, 6, 6),
    ),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False), (4, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6, padding=1, bias=False), (6, 6, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_rebuild_output_and_gradient(name):
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
    rebuilt = torch.einsum(
        "rgn,gmn->rgm", rows.reshape(-1, groups, rows.shape[1]), weights
    ).flatten(1)
    torch.testing.assert_close(rebuilt, output_rows(layer, output))
    cotangent = torch.randn_like(output)
    (gradient,) = torch.autograd.grad(output, layer.weight, cotangent)
    g = output_rows(layer, cotangent).reshape(len(rebuilt), groups, -1)
    summed = torch.einsum("rgm,rgn->gmn", g, rows.reshape(-1, groups, rows.shape[1]))
    torch.testing.assert_close(summed.reshape(gradient.shape), gradient)


def test_thinned_rows_cover_all_positions_in_turn_and_keep_the_scale():
    layer = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x = torch.randn(2, 2, 12, 12, dtype=torch.float64)
    full, _ = input_rows(layer, x)
    total = torch.zeros(18, 18, dtype=torch.float64)
    for phase in range(8):
        rows, weight = input_rows(
            layer, x, max_rows=40, phase=phase
        )  # 288 rows: a grid of spacings 4 and 2
        total += weight * rows.T @ rows / 8
    torch.testing.assert_close(total, full.T @ full)


def tanh_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(144, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def batch(n=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64), torch.randint(
        3, (n,), generator=generator
    )


def factors(optimizer):
    return {
        n: (optimizer.state[e.parameter]["A"], optimizer.state[e.parameter]["G"])
        for n, e in optimizer._curved().items()
    }


def refreshed(model, x, y, loss=F.cross_entropy, **options):
    optimizer = KFAC(model, every=0, **options)
    optimizer.refresh([(x, y)], loss)
    return factors(optimizer)


def test_factors_equal_those_of_curvlinops():
    peers = pytest.importorskip("curvlinops")
    model = tanh_net()
    x, y = batch()
    peer = peers.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x, y)],
        fisher_type="empirical",
        separate_weight_and_bias=True,
    )
    ours = refreshed(model, x, y)
    for layer in ("0", "3", "5"):
        a, g = ours[f"{layer}.weight"]
        their_a, their_g = peer._input_covariances[layer], peer._gradient_covariances[layer]
        # they divide A by the number of positions and multiply G by it: only the product has a meaning
        torch.testing.assert_close(their_a * torch.trace(their_g), a * torch.trace(g))
        torch.testing.assert_close(their_g * torch.trace(their_a), g * torch.trace(a))


def test_the_scale_is_that_of_the_exact_fisher_matrix_for_a_linear_network():
    """With one layer and a Gaussian likelihood whose noise is sampled, A ⊗ G is the exact Fisher matrix on average."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    x = torch.randn(4000, 4, dtype=torch.float64)
    optimizer = KFAC(model, every=0, reduction="sum")
    optimizer.curvature._collector().max_rows = None
    optimizer.refresh(
        [(x, x[:, :3])],
        lambda z, y: 0.5 * (z - y).square().sum(),
        sampler=lambda z: z + torch.randn_like(z),
    )
    a, g = factors(optimizer)["weight"]
    torch.testing.assert_close(a, x.T @ x / 4000)
    torch.testing.assert_close(g, torch.eye(3, dtype=torch.float64), atol=0.1, rtol=0)


def test_means_sums_and_accumulation_give_the_same_factors():
    x, y = batch()
    expected = refreshed(tanh_net(), x, y)["3.weight"]
    total = refreshed(
        tanh_net(), x, y, lambda z, t: F.cross_entropy(z, t, reduction="sum"), reduction="sum"
    )["3.weight"]
    model = tanh_net()
    optimizer = KFAC(model, every=1)
    for _ in range(2):  # the second step collects
        optimizer.zero_grad()
        for part in (slice(0, 6), slice(6, 12)):
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
        if not optimizer.curvature.collector:
            model.load_state_dict(tanh_net().state_dict())
            optimizer.step()
            model.load_state_dict(tanh_net().state_dict())
    optimizer.step()
    for found in (total, factors(optimizer)["3.weight"]):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_token_losses_count_tokens():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(5, 7, 4, dtype=torch.float64), torch.randint(3, (5, 7))
    tokens = refreshed(model, x, y, lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()))[
        "weight"
    ]
    flat = refreshed(model, x.flatten(0, 1), y.flatten())["weight"]
    for mine, theirs in zip(tokens, flat, strict=True):
        torch.testing.assert_close(mine, theirs)


class Returning(nn.Module):
    """Logits of tokens, returned in one way or another."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.map, self.way = nn.Linear(4, 3).double(), way

    def forward(self, x, y):
        z = self.map(x)
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=-1)
        return (
            {"loss": loss, "logits": z}
            if self.way == "mapping"
            else (loss, z)
            if self.way == "tuple"
            else loss
        )


@pytest.mark.parametrize("way", ["mapping", "tuple", "loss"])
def test_terms_are_those_with_a_gradient_however_logits_are_returned(way):
    """Positions that are ignored do not count; where only the loss is returned, the number is doubted aloud."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (5, 7), generator=generator)
    y[:, 4:] = -1
    model = Returning(way)
    optimizer = KFAC(model, every=1, lr=1e-9)

    def two_steps():
        for _ in range(2):  # the second step collects
            optimizer.zero_grad()
            found = model(x, y)
            (
                found["loss"] if way == "mapping" else found[0] if way == "tuple" else found
            ).backward()
            optimizer.step()

    if way == "loss":
        with pytest.warns(UserWarning, match="returns nothing but its loss"):
            two_steps()
        return
    two_steps()
    plain = nn.Linear(4, 3).double()
    plain.load_state_dict(model.map.state_dict())
    kept = y.flatten() >= 0
    expected = refreshed(plain, x.flatten(0, 1)[kept], y.flatten()[kept])["weight"]
    found = factors(optimizer)["map.weight"]
    # rows without a gradient count among the inputs alone
    torch.testing.assert_close(found[1], expected[1])


def test_classes_may_be_in_the_second_axis_of_sequences():
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, 7, dtype=torch.float64), torch.randint(3, (5, 7))
    model = nn.Conv1d(4, 3, 1).double()
    flat = nn.Linear(4, 3).double()
    flat.load_state_dict({"weight": model.weight.detach()[..., 0], "bias": model.bias.detach()})
    found = refreshed(model, x, y)["weight"]
    expected = refreshed(flat, x.mT.flatten(0, 1), y.flatten())["weight"]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", ["sum", "micro-batches"])
def test_a_loss_that_is_no_mean_is_said_once(kind):
    net = bn_net()
    optimizer = MKFAC(net, every=1, manifold_lr=1e-4, lr=1e-6, example_input=torch.randn(8, 6))

    def steps():
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(4 if kind == "micro-batches" else 1):
                loss = F.cross_entropy(
                    net(torch.randn(32, 6)), torch.randint(3, (32,)), reduction="none"
                )
                (loss.sum() if kind == "sum" else loss.mean()).backward()
            optimizer.step()

    with pytest.warns(
        UserWarning, match=r"the loss is no mean over its terms.*reduction='sum'"
    ) as caught:
        steps()
    assert len(caught) == 1


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.003])
def test_a_grad_scaler_and_clipping_do_not_change_the_curvature(clip, relative):
    """Absolute damping has to be told of the scaler; without that it says so."""

    def run(scale, told=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        x, y = torch.randn(32, 6), torch.randint(3, (32,))
        if relative:
            optimizer = SphereOptimizer(model, direction="natural", every=1)
        else:
            given = scaler if told else None
            optimizer = MKFAC(model, every=1, example_input=x, grad_scaler=given)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        state = optimizer.state[model[0].weight]
        return [state[key] for key in (("left", "right") if relative else ("A", "G"))]

    expected = run(1.0)
    for mine, theirs in zip(run(2.0**15), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
    if not relative:
        with pytest.warns(UserWarning, match="or pass grad_scaler="):
            run(2.0**15, told=False)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", ["samples", "tokens"])
@pytest.mark.parametrize("count", [1, 4, 10])
def test_refresh_over_batches_is_the_mean_over_their_terms(count, shape, reduction):
    """Of equal batches it is that of one; of parts of a batch, large and small, that of the whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    size = (40, 4) if shape == "samples" else (40, 3, 4)
    x = torch.randn(size, dtype=torch.float64)
    y = torch.randint(3, size[:-1])

    def loss(z, t):
        return F.cross_entropy(z.flatten(0, -2), t.flatten(), reduction=reduction)

    def factors_of(batches):
        optimizer = KFAC(model, every=0, reduction=reduction)
        optimizer.refresh(batches, loss)
        return factors(optimizer)["2.weight"]

    whole = factors_of([(x, y)])
    sizes = [1] * (count - 1) + [41 - count]
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    for batches in ([(x, y)] * count, parts):
        for mine, theirs in zip(factors_of(batches), whole, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_inputs_before_a_batch_norm_are_centred_and_others_are_not():
    torch.manual_seed(0)
    x, y = 3 + torch.randn(64, 6, dtype=torch.float64), torch.randint(3, (64,))
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    a = refreshed(normed, x, y)["0.weight"][0]
    torch.testing.assert_close(a, (x - x.mean(0)).T @ (x - x.mean(0)) / 64)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    torch.testing.assert_close(refreshed(plain, x, y)["0.weight"][0], x.T @ x / 64)


def test_factors_are_those_at_unit_norm():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps=1e-12), nn.Linear(8, 3)).double()
    x, y = torch.randn(64, 6, dtype=torch.float64), torch.randint(3, (64,))
    found = []
    for scale in (1.0, 7.0):
        twin = copy.deepcopy(net)
        twin[0].weight.data.mul_(scale)
        optimizer = MKFAC(twin, every=0, example_input=torch.randn(8, 6))
        optimizer.refresh([(x, y)], F.cross_entropy)
        found.append(factors(optimizer)["0.weight"])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def spd(n, decay, seed):
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))
    return (q * (torch.arange(1, n + 1, dtype=torch.float64) ** -decay)) @ q.T


@pytest.mark.parametrize(("m", "n", "decay"), [(5, 7, 1.0), (90, 150, 2.0), (40, 300, 0.2)])
def test_exact_inverses_equal_the_dense_solution(m, n, decay):
    a, g, damping = spd(n, decay, 0), spd(m, decay, 1), 0.1
    gradient = torch.randn(m, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = dense(a, g, damping).apply(gradient)
    if m * n < 50:
        solved = damping * torch.linalg.solve(
            torch.kron(g, a) + damping * torch.eye(m * n), gradient.reshape(-1)
        )
        torch.testing.assert_close(expected, solved.reshape(m, n))
    found = exact(a, g, damping).apply(gradient)
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_large_damping_is_the_gradient_exactly():
    a, g = spd(7, 1.0, 0), spd(5, 1.0, 1)
    gradient = torch.randn(5, 7, dtype=torch.float64)
    for inverse in (dense(a, g, 1e12), exact(a, g, 1e12), relative(a, g, 1e12)):
        torch.testing.assert_close(inverse.apply(gradient), gradient)
    for inverse in (relative(0 * a, 0 * g, 0.1), dense(0 * a, 0 * g, 0.1)):
        torch.testing.assert_close(inverse.apply(gradient), gradient)


def test_relative_inverses_do_not_see_the_scale():
    a, g = spd(7, 1.0, 0), spd(5, 1.0, 1)
    gradient = torch.randn(5, 7, dtype=torch.float64)
    expected = relative(a, g, 0.1).apply(gradient)
    torch.testing.assert_close(relative(1e3 * a, 1e-5 * g, 0.1).apply(gradient), expected)
    left = 0.1 * g.trace() / 5
    right = 0.1 * a.trace() / 7
    solved = left * torch.linalg.solve(g + left * torch.eye(5), gradient)
    solved = right * torch.linalg.solve(a + right * torch.eye(7), solved.T).T
    torch.testing.assert_close(expected, solved)


def train(model, optimizer, steps=6, forward=None):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x, y = torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy((forward or model)(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def bn_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 3)
    )


@pytest.mark.parametrize(
    ("natural", "gradient"),
    [
        (
            lambda net: MKFAC(net, damping=1e9, every=1, example_input=torch.randn(8, 6)),
            lambda net: SGDG(net, example_input=torch.randn(8, 6)),
        ),
        (
            lambda net: SphereOptimizer(net, direction="natural", damping=1e9, every=1, rest="sgd"),
            lambda net: SphereOptimizer(net, direction="gradient", rest="sgd"),
        ),
    ],
)
def test_natural_directions_with_large_damping_are_gradients(natural, gradient):
    net, twin = bn_net(), bn_net()
    for mine, theirs in zip(train(net, natural(net)), train(twin, gradient(twin)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_curvature_collects_itself_and_is_silent_in_evaluation():
    net = bn_net()
    optimizer = SphereOptimizer(net, direction="natural", every=2)
    assert "no curvature yet" in optimizer.report()
    train(net, optimizer, steps=1)
    assert optimizer.curvature.collector.attached
    net.eval()
    net(torch.randn(8, 6)).sum().backward()
    net.train()
    with torch.no_grad():
        net(torch.randn(8, 6))
    assert not optimizer.curvature.collector.sums
    train(net, optimizer, steps=2)
    assert "curvature: 1 of 1 weight" in optimizer.report()
    found = optimizer.diagnose()["0.weight"]
    assert found.cosine < 0.99
    assert found.radial < 0.05


def test_steps_are_continuous_when_curvature_arrives():
    net = bn_net()
    optimizer = MKFAC(net, damping=3e-3, every=1, example_input=torch.randn(8, 6))
    sizes = []
    for _ in range(4):
        before = net[0].weight.detach().clone()
        train(net, optimizer, steps=1)
        sizes.append(float((net[0].weight.detach() - before).norm()))
    assert max(sizes) < 4 * sizes[0]


def test_no_curvature_is_said_once():
    net = bn_net()
    optimizer = SphereOptimizer(net, direction="natural", every=0)
    with pytest.warns(UserWarning, match="no curvature has been collected in 50 steps") as caught:
        train(net, optimizer, steps=120)
    assert len(caught) == 1


def test_checkpointed_layers_autocast_and_frozen_weights_are_collected():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (
                bn_net()[:3],
                nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)),
            )

        def forward(self, x):
            return self.second(
                checkpoint(self.first, x, use_reentrant=False, preserve_rng_state=False)
            )

    net = Net()
    optimizer = SphereOptimizer(net, direction="natural", every=1)
    with torch.autocast("cpu", torch.bfloat16):
        train(net, optimizer, steps=3)
    assert {n for n, e in optimizer._curved().items() if "A" in optimizer.state[e.parameter]} == {
        "first.0.weight",
        "second.0.weight",
    }


def test_refresh_depends_on_its_batches_alone():
    net = bn_net()
    optimizer = MKFAC(net, every=0, example_input=torch.randn(8, 6))
    batches = [(torch.randn(32, 6), torch.randint(3, (32,)))] * 32
    optimizer.refresh(batches, F.cross_entropy)
    expected = factors(optimizer)["0.weight"]
    F.cross_entropy(
        net(batches[0][0]), batches[0][1]
    ).backward()  # what a training step leaves behind
    optimizer.refresh(batches, F.cross_entropy)
    for mine, theirs in zip(factors(optimizer)["0.weight"], expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_refresh_leaves_the_model_alone():
    net = bn_net().eval()
    optimizer = MKFAC(net, every=0, example_input=torch.randn(8, 6))
    before = {n: t.clone() for n, t in net.state_dict().items()}
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    optimizer.refresh([(x, y)], nn.CrossEntropyLoss(), sampler="mc")
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert not net.training
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(ValueError, match="nothing to refresh"):
        SGDG(net, example_input=x).refresh([(x, y)], nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="no way is known to sample"):
        optimizer.refresh([(x, y)], nn.HuberLoss(), sampler="mc")


@pytest.mark.slow
def test_compiled_models_and_steps_are_eager_where_curvature_is_collected():
    net = bn_net()
    compiled = torch.compile(net, backend="eager")
    optimizer = SphereOptimizer(compiled, direction="natural", every=2)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    train(net, optimizer, steps=5, forward=compiled)
    twin = bn_net()
    reference = SphereOptimizer(twin, direction="natural", every=2)
    train(twin, reference, steps=5)
    assert "curvature: 1 of 1 weight" in optimizer.report()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_inverses_are_renewed_in_their_memory_for_captured_graphs(monkeypatch):
    net = bn_net()
    optimizer = SphereOptimizer(net, direction="natural", every=1)
    train(net, optimizer, steps=3)
    state = optimizer.state[net[0].weight]
    left, address = state["left"].clone(), state["left"].data_ptr()
    train(net, optimizer, steps=2)
    assert state["left"].data_ptr() == address
    assert not torch.equal(state["left"], left)
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    preset = MKFAC(net, every=1, example_input=torch.randn(8, 6))
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        train(net, preset, steps=1)
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


@pytest.mark.slow
def test_hooks_and_the_stance_of_the_compiler_last_until_evaluation_or_the_optimizer_ends():
    from torch._dynamo import eval_frame

    def hooks(net):
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())

    net = bn_net()
    torch.compile(net, backend="eager")
    optimizer = SphereOptimizer(net, direction="natural", every=1)
    train(net, optimizer, steps=3)
    assert hooks(net) == 3
    assert eval_frame._stance.stance == "force_eager"
    net.eval()
    net(torch.randn(4, 6))
    assert hooks(net) == 0
    assert eval_frame._stance.stance == "default"
    net.train()
    train(net, optimizer, steps=1)
    assert hooks(net) == 3
    del optimizer
    gc.collect()
    assert hooks(net) == 0
    assert eval_frame._stance.stance == "default"


def test_groups_that_ask_for_curvature_get_it_or_an_error():
    net = bn_net()
    with pytest.raises(TypeError, match="collects curvature from the module"):
        SphereOptimizer([{"params": [net[0].weight], "rule": "kfac"}])
    with pytest.raises(ValueError, match="direction must be one of"):
        SphereOptimizer([{"params": [net[0].weight], "rule": "spheres", "direction": "newton"}])
    head = nn.Linear(3, 3)
    model = nn.Sequential(net, head)
    head.requires_grad_(False)
    optimizer = SphereOptimizer(model, direction="natural", every=1)
    for group in optimizer.param_groups:  # what a user does who moves a weight to another group
        kept = [i for i, p in enumerate(group["params"]) if p is not head.weight]
        for key in ("params", "param_names", "spheres", "layouts"):
            group[key] = [group[key][i] for i in kept]
    optimizer.add_param_group({"params": [("1.weight", head.weight)], "rule": "kfac"})
    head.requires_grad_(True)
    train(model, optimizer, steps=3)
    assert "curvature: 3 of 3 weights" in optimizer.report()
