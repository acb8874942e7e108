"""Putting a trained network on spheres leaves its output in evaluation mode alone: running statistics come along."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import Net, build, conv, head, images
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from fisherfold.optim import KFAC, MKFAC, SGDG

EPS = 1e-13


def bn(channels: int = 6, **options: Any) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=EPS, **options)


def stack(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(layers), head())


def dense() -> nn.Module:
    """One convolution feeds two norms, and one norm sees the channels of two convolutions."""

    def forward(s: Any, x: Tensor) -> Tensor:
        first = s.p(x)
        second = s.q(F.relu(s.a(first)))
        return s.head(F.relu(s.b(torch.cat([second, first], dim=1))))

    return Net(forward, p=conv(3, 4, bias=True), a=bn(4), q=conv(4, 2), b=bn(6), head=head())


class Functional(nn.Module):
    """Batch norm by hand, with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.head = conv(3, 6, bias=True), head()
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("running_var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        z = F.batch_norm(self.p(x), self.running_mean, self.running_var, training=self.training, eps=EPS)
        return self.head(F.relu(z))


def shared_norm() -> nn.Module:
    """One norm behind two uses of one convolution."""
    return Net(
        lambda s, x: s.head(F.relu(s.a(s.p(x))) + F.relu(s.a(s.p(x.flip(0) + 1)))), p=conv(3, 6), a=bn(), head=head()
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "conv": stack(conv(3, 6), bn(), nn.ReLU()),
    "conv with bias": stack(conv(3, 6, bias=True), bn(), nn.ReLU()),
    "conv, relu": stack(conv(3, 6), nn.ReLU(), bn()),
    "two in a row": stack(conv(3, 6), bn(), nn.ReLU(), conv(6, 6, bias=True), bn(), nn.ReLU()),
    "groups": stack(conv(3, 6, groups=3), bn(), nn.ReLU()),
    "cumulative average": stack(conv(3, 6, bias=True), bn(momentum=None), nn.ReLU()),
    "no running statistics": stack(conv(3, 6), bn(track_running_stats=False), nn.ReLU()),
    "not affine": stack(conv(3, 6, bias=True), bn(affine=False), nn.ReLU()),
    "instance": stack(conv(3, 6, bias=True), nn.InstanceNorm2d(6, eps=EPS, track_running_stats=True), nn.ReLU()),
    "product": stack(conv(3, 4), conv(4, 6), bn(), nn.ReLU()),
    "transposed": stack(nn.ConvTranspose2d(3, 6, 3), bn(), nn.ReLU()),
    "mean pool": stack(conv(3, 6, bias=True), nn.AvgPool2d(2), bn(), nn.ReLU()),
    "synchronised": stack(conv(3, 6, bias=True), nn.SyncBatchNorm(6, eps=EPS), nn.ReLU()),
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(192, 5), nn.BatchNorm1d(5, eps=EPS), nn.Tanh(), nn.Linear(5, 3)
    ),
    "dense": dense,
    "functional": Functional,
    "shared norm": shared_norm,
}


def trained(name: str, builder: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The network in float64, in evaluation mode, with gains, biases and running statistics that are not trivial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        net = (builder or NETS[name])().double()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.4 * torch.randn_like(parameter))
            for key, buffer in net.named_buffers():
                if key.endswith("running_mean"):
                    buffer.normal_()
                if key.endswith("running_var"):
                    buffer.uniform_(0.3, 3.0)
    return net.eval()


def change_in_evaluation(net: nn.Module, make: Callable[[nn.Module], Any]) -> float:
    x = images().double()
    before = net(x).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(net)
    return float((net(x).detach() - before).norm() / before.norm())


@pytest.mark.parametrize("kind", [MKFAC, SGDG])
@pytest.mark.parametrize("name", list(NETS))
def test_output_in_evaluation_mode_stays(name: str, kind: type) -> None:
    net = trained(name)
    optimizers: list[Any] = []
    change = change_in_evaluation(net, lambda n: optimizers.append(kind(n, example_input=images().double())))
    assert change < 1e-9
    rows = [p.reshape(s, -1).norm(dim=1) for p, _, s in optimizers[0]._entries() if s]
    assert rows
    for norms in rows:
        torch.testing.assert_close(norms, torch.ones_like(norms))


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("conv", {"0.weight": "row"}),
        ("conv with bias", {"0.weight": "tensor"}),
        ("dense", {"p.weight": 2, "q.weight": "row"}),
        ("conv, relu", {"0.weight": "row"}),
    ],
)
def test_statistics_come_along_with_a_mapping_and_an_example(name: str, invariant: Any) -> None:
    x = images().double()
    assert change_in_evaluation(trained(name), lambda n: MKFAC(n, invariant=invariant, example_input=x)) < 1e-9


@pytest.mark.parametrize(
    "name", ["conv", "conv with bias", "two in a row", "groups", "cumulative average", "instance", "synchronised"]
)
def test_statistics_come_along_without_an_example(name: str) -> None:
    """From the structure, for the modules' guess as well as for a mapping with another partition."""
    assert change_in_evaluation(trained(name), SGDG) < 1e-9
    assert change_in_evaluation(trained(name), lambda n: SGDG(n, invariant={"0.weight": "tensor"})) < 1e-9


def test_bias_is_not_scaled() -> None:
    """W ← cW with b as it is: mean ← c (mean - b) + b, var ← c² var."""
    net = trained("conv with bias")
    c = 1 / net[0].weight.detach().flatten(1).norm(dim=1)
    b, mean, variance = net[0].bias.detach().clone(), net[1].running_mean.clone(), net[1].running_var.clone()
    MKFAC(net, example_input=images())
    torch.testing.assert_close(net[0].bias.detach(), b, rtol=0, atol=0)
    torch.testing.assert_close(net[1].running_mean, c * (mean - b) + b)
    torch.testing.assert_close(net[1].running_var, c**2 * variance)


def test_channels_that_are_dead_at_the_start_are_scaled_too() -> None:
    """Behind a ReLU that nothing passes on the example, the factor cannot be seen at the model's own values."""
    net = trained("", lambda: nn.Sequential(conv(3, 6), nn.ReLU(), bn(), head()))
    with torch.no_grad():
        net[0].weight[0] = -net[0].weight[0].abs()
    x = images().double()
    MKFAC(copied := copy.deepcopy(net), example_input=x.abs())
    torch.testing.assert_close(copied(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_in_half_precision(dtype: torch.dtype) -> None:
    net = trained("conv with bias").to(dtype)
    c = 1 / net[0].weight.detach().double().flatten(1).norm(dim=1)
    expected = c**2 * net[1].running_var.double()
    MKFAC(net, example_input=images().to(dtype))
    assert net[1].running_var.dtype == dtype
    torch.testing.assert_close(net[1].running_var.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_effect_of_epsilon_is_all_that_remains() -> None:
    """γ (x - m)/√(v + ε): with weights of length 1/c the variance is c² v, beside the same ε."""
    net = trained("", lambda: nn.Sequential(conv(3, 6), nn.BatchNorm2d(6, eps=1e-2), nn.Identity()))
    x, norm = images().double(), net[1]
    c = 1 / net[0].weight.detach().flatten(1).norm(dim=1)
    ratio = c * ((norm.running_var + 1e-2) / (c**2 * norm.running_var + 1e-2)).sqrt()
    before = net(x).detach() - norm.bias.detach()[:, None, None]
    SGDG(net)
    torch.testing.assert_close(net(x) - norm.bias[:, None, None], before * ratio[:, None, None])


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"])
def test_spectral_norm_before_batch_norm_computes_what_it_did(wrap: Callable[..., nn.Module]) -> None:
    """Its vectors stay behind where rows are scaled by themselves: the weight is one sphere, whose scale σ follows.

    Not only at once: a pass in training mode, which renews the vectors, finds them where they were.
    """
    net, twin = (trained("", lambda: nn.Sequential(wrap(conv(3, 6, bias=True)), bn(), head())) for _ in range(2))
    x = images().double()
    optimizer = MKFAC(net, example_input=x)
    (finding,) = [f for f in optimizer.findings.values() if f.kind != "none"]
    assert finding.spheres == 1
    assert re.search("Euler's identity holds; 0.*_u follows smaller blocks; and rescaling", finding.reason)
    for training in (False, True, False):
        torch.testing.assert_close(net.train(training)(x), twin.train(training)(x), rtol=1e-9, atol=1e-9)


def test_a_buffer_that_follows_every_scale_keeps_a_weight_euclidean() -> None:
    class Observed(nn.Linear):
        """Rounds its weight to a grid as fine as the largest entry that it has seen, as fake quantisation does."""

        def __init__(self) -> None:
            super().__init__(5, 6)
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.largest.copy_(self.weight.detach().abs().max())
            return F.linear(x, self.weight.clamp(-self.largest, self.largest), self.bias)

    net = nn.Sequential(Observed(), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net(x)
    expected = net.eval()(x).detach()
    with pytest.warns(UserWarning, match="no weight of Sequential was found to be scale invariant"):
        optimizer = MKFAC(net, example_input=x)
    assert optimizer.findings["0.weight"].kind == "none"
    # since torch 2.15 the slope of clamp is another one at its bounds, and no identity holds
    assert re.search("its scale moves 0.largest, which is not carried over|Euler's identity fails", optimizer.report())
    torch.testing.assert_close(net(x), expected)


def test_a_factor_that_depends_on_the_values_of_weights_is_not_carried_over() -> None:
    net = trained("", lambda: nn.Sequential(parametrizations.spectral_norm(conv(3, 6)), bn(), nn.ReLU(), head()))
    with pytest.warns(UserWarning, match=r"running statistics of 1 could not be carried over"):
        MKFAC(net, invariant={"0.parametrizations.weight.original": "row"}, example_input=images().double())


def test_what_cannot_be_carried_over_is_named_once() -> None:
    """Without an example the structure does not see through a ReLU; new statistics are worth no warning."""
    net = trained("conv, relu")
    with pytest.warns(UserWarning, match=r"statistics of 2 could not be carried over.*with example_input") as seen:
        MKFAC(net, invariant={"0.weight": "row"})
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MKFAC(nn.Sequential(conv(3, 6), nn.ReLU(), bn(), head()), invariant={"0.weight": "row"})


def test_change_that_is_no_scaling_is_named() -> None:
    """A mapping that puts a weight on spheres which is not invariant."""
    net = trained("", lambda: nn.Sequential(conv(3, 6, bias=True), nn.Tanh(), bn(), head()))
    with pytest.warns(UserWarning, match=r"running statistics of 2 could not be carried over"):
        MKFAC(net, invariant={"0.weight": "row"}, example_input=images())


def test_statistics_stay_to_the_bit_where_nothing_is_scaled() -> None:
    """A Euclidean optimizer; norms behind no scaled weight; and a second optimizer for the same network."""
    net = trained("two in a row")
    x = images()
    saved = copy.deepcopy(net.state_dict())
    KFAC(net)
    assert all(torch.equal(value, saved[key]) for key, value in net.state_dict().items())
    MKFAC(net, invariant={"0.weight": "row"}, example_input=x)
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(net.state_dict()[f"4.{key}"], saved[f"4.{key}"])
        assert torch.equal(net.state_dict()[f"1.{key}"], saved[f"1.{key}"]) == (key == "num_batches_tracked")
    MKFAC(net, example_input=x)
    again = copy.deepcopy(net.state_dict())
    SGDG(net, example_input=x)
    assert all(torch.equal(v, again[key]) for key, v in net.state_dict().items() if "running" in key)


@pytest.mark.parametrize("name", ["conv with bias", "conv, relu"])
def test_weight_that_is_freed_later_brings_its_statistics(name: str) -> None:
    net = trained(name)
    net[0].weight.requires_grad_(False)
    x = images().double()
    before = net(x).detach()
    optimizer = SGDG(net, lr=0.0, manifold_lr=0.0, example_input=x)
    assert torch.equal(net(x), before)
    net[0].weight.requires_grad_(True)
    net(x).sum().backward()
    with pytest.warns(UserWarning, match="its length matters: batch norm '.' is in eval mode"):
        optimizer.step()
    torch.testing.assert_close(net[0].weight.flatten(1).norm(dim=1), torch.ones(6).double())
    torch.testing.assert_close(net(x), before)


def test_resuming_is_not_touched() -> None:
    """The optimizer is made for a fresh network, then both are loaded: all of it as it was saved."""
    net, x = trained("two in a row"), images().double()
    optimizer = SGDG(net, example_input=x)
    net.train()
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    other = trained("two in a row")
    resumed = SGDG(other, example_input=x)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert all(torch.equal(value, saved[0][key]) for key, value in other.state_dict().items())


def test_random_state_and_training_mode_stay() -> None:
    net, example, _ = build("dropout")
    net.eval()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    MKFAC(net, example_input=example)
    assert torch.equal(torch.get_rng_state(), state)
    assert not net.training


class Averaging(nn.Module):
    """A batch norm written by hand, with averages under any names."""

    def __init__(self, channels: int, mean: str, variance: str) -> None:
        super().__init__()
        self.names = (mean, variance)
        self.register_buffer(mean, torch.zeros(channels))
        self.register_buffer(variance, torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = (getattr(self, name) for name in self.names)
        if self.training:
            mean, variance = x.mean(dim=0), x.var(dim=0, unbiased=False)
            for name, new in zip(self.names, (mean, variance), strict=True):
                setattr(self, name, torch.lerp(getattr(self, name), new.detach(), 0.5))
        return (x - mean) / (variance + EPS).sqrt()


def embedded(width: int) -> nn.Module:
    """Two weights that are invariant as rows and as a whole: of unit length both, their product is tiny."""
    return nn.Sequential(
        nn.Embedding(20, width), nn.Linear(width, width, bias=False), nn.LayerNorm(width), nn.Linear(width, 3)
    )


@pytest.mark.parametrize(
    ("builder", "x"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 6), Averaging(6, "running_mean", "running_var"), nn.Linear(6, 3)), None),
        (lambda: nn.Sequential(nn.Linear(5, 6), Averaging(6, "moving_mean", "moving_var"), nn.Linear(6, 3)), None),
        (lambda: embedded(256), torch.arange(20)),
    ],
    ids=["by hand", "other names", "embedding"],
)
def test_weights_keep_their_lengths_where_the_network_would_compute_something_else(
    builder: Callable[[], nn.Module], x: Tensor | None
) -> None:
    torch.manual_seed(0)
    net = builder().double()
    x = torch.randn(30, 5, dtype=torch.float64) if x is None else x
    with torch.no_grad():
        next(net.parameters()).mul_(4.0)
        for _ in range(8):
            net(x)  # averages
    saved, before = copy.deepcopy(net.state_dict()), net.eval()(x).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = SGDG(net.train(), lr=0.0, manifold_lr=0.1, example_input=x)
    assert all(torch.equal(value, saved[key]) for key, value in net.state_dict().items())
    torch.testing.assert_close(net.eval()(x), before)
    assert "of other lengths" in optimizer.report()
    weight = net[0].weight
    lengths = weight.detach().norm(dim=1)
    net.train()(x)[:, 0].sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach().norm(dim=1), lengths)
    assert not torch.equal(weight, saved["0.weight"])


def test_a_head_of_zeros_does_not_hide_that_lengths_matter() -> None:
    torch.manual_seed(0)
    net = embedded(256)
    nn.init.zeros_(net[3].weight)
    saved = copy.deepcopy(net.state_dict())
    SGDG(net, example_input=torch.arange(20))
    assert all(torch.equal(value, saved[key]) for key, value in net.state_dict().items())


def test_networks_whose_output_stays_have_unit_rows() -> None:
    net = embedded(4)
    optimizer = SGDG(net, example_input=torch.arange(20))
    torch.testing.assert_close(net[0].weight.norm(dim=1), torch.ones(20))
    assert "of other lengths" not in optimizer.report()


def test_lengths_that_are_kept_are_kept_when_a_run_goes_on_with_trained_weights() -> None:
    """Training makes the product of two weights larger, and the ε beside it less: that must not change the answer."""
    torch.manual_seed(0)
    net, x = embedded(256), torch.arange(20)
    optimizer = MKFAC(net, manifold_lr=0.05, damping=0.1, example_input=x)
    for step in range(12):
        with optimizer.statistics(enabled=step % 2 == 0):
            optimizer.zero_grad()
            F.cross_entropy(net(x), x % 3).backward()
        optimizer.step()
    saved = copy.deepcopy(net.state_dict())
    MKFAC(net, example_input=x)
    assert all(torch.equal(value, saved[key]) for key, value in net.state_dict().items())
