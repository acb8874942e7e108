"""Small networks and what is scale invariant in each: the suite that the probe must get right.

Every entry gives a builder, an example input and the kinds of its matrix-shaped parameters that are not ``none``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class Net(nn.Module):
    """A module from named layers and a forward function."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.rule = forward

    def forward(self, x: Any) -> Any:
        return self.rule(self, x)


def conv(i: int, o: int, k: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=k // 2, **{"bias": False, **options})


def images(*shape: int) -> Tensor:
    return torch.randn(shape or (6, 3, 8, 8), generator=torch.Generator().manual_seed(1))


def head(channels: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 4))


def plain(norm: nn.Module, *, bias: bool = False, between: nn.Module | None = None) -> nn.Module:
    middle = [] if between is None else [between]
    return nn.Sequential(conv(3, 6, bias=bias), *middle, norm, nn.ReLU(), head())


def post_activation_residual() -> nn.Module:
    return Net(
        lambda s, x: s.head(F.relu(s.b(s.q(F.relu(s.a(s.p(x))))) + s.skip(x))),
        p=conv(3, 6),
        a=nn.BatchNorm2d(6),
        q=conv(6, 6),
        b=nn.BatchNorm2d(6),
        skip=conv(3, 6, 1),
        head=head(),
    )


def pre_activation_residual() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        x = s.stem(x)
        return s.head(F.relu(s.last(x + s.q(F.relu(s.b(s.p(F.relu(s.a(x)))))))))

    return Net(
        forward,
        stem=conv(3, 6),
        a=nn.BatchNorm2d(6),
        p=conv(6, 6),
        b=nn.BatchNorm2d(6),
        q=conv(6, 6),
        last=nn.BatchNorm2d(6),
        head=head(),
    )


def dense_concatenation() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        first = s.p(x)
        second = s.q(F.relu(s.a(first)))
        return s.head(F.relu(s.b(torch.cat([first, second], dim=1))))

    return Net(
        forward, p=conv(3, 4), a=nn.BatchNorm2d(4), q=conv(4, 2), b=nn.BatchNorm2d(6), head=head()
    )


def raw_skip() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        first = s.p(x)
        return s.head(F.relu(s.a(first)) + first)

    return Net(forward, p=conv(3, 6), a=nn.BatchNorm2d(6), head=head())


def used_twice(*, both_normed: bool) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        x = F.relu(s.a(s.stem(x)))
        x = F.relu(s.b(s.p(x)))
        return s.head(F.relu(s.c(s.p(x)) if both_normed else s.p(x)))

    return Net(
        forward,
        stem=conv(3, 6),
        a=nn.BatchNorm2d(6),
        p=conv(6, 6),
        b=nn.BatchNorm2d(6),
        c=nn.BatchNorm2d(6),
        head=head(),
    )


def tied() -> nn.Module:
    net = nn.Sequential(
        nn.Linear(6, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )
    net[3].weight = net[0].weight
    return net


class Attention(nn.Module):
    """A pre-LN transformer block, with or without normalised queries and keys."""

    def __init__(self, *, qk_norm: bool = False, split: bool = False) -> None:
        super().__init__()
        d = 8
        self.qk_norm, self.split = qk_norm, split
        self.embed = nn.Linear(5, d)
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        if split:
            self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        else:
            self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.head = nn.Linear(d, 3)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.ln1(x)
        q, k, v = (self.q(y), self.k(y), self.v(y)) if self.split else self.qkv(y).chunk(3, dim=-1)
        q, k, v = self.heads(q), self.heads(k), self.heads(v)
        if self.qk_norm:
            q, k = (F.normalize(t, dim=-1) * 2.0 for t in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.ln2(x))))
        return self.head(self.ln3(x).mean(dim=1))


class VisionTransformer(nn.Module):
    """Patches by a strided convolution, a class token and one transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        y = self.ln1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.ln2(x))
        return self.head(self.ln3(x[:, 0]))


def mlp(norm: nn.Module, *, bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6, bias=bias), norm, nn.ReLU(), nn.Linear(6, 3))


def grouped(groups: int) -> nn.Module:
    return nn.Sequential(
        conv(3, 6),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        conv(6, 6, groups=groups),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        head(),
    )


def weight_normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 3))


def eval_mode() -> nn.Module:
    """Batch norm whose forward is pinned to its running statistics: not a normalisation at all."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(F.relu(F.batch_norm(s.p(x), s.mean, s.var, training=False)))

    net = Net(forward, p=conv(3, 6), head=head())
    net.register_buffer("mean", torch.zeros(6))
    net.register_buffer("var", torch.ones(6))
    return net


def functional_norm() -> nn.Module:
    return Net(
        lambda s, x: s.head(F.relu(F.batch_norm(s.p(x), None, None, training=True))),
        p=conv(3, 6),
        head=head(),
    )


def branches() -> nn.Module:
    """One convolution feeds two batch norms: invariant; another one batch norm and the head: not."""

    def forward(s: Any, x: Tensor) -> dict[str, Tensor]:
        first = s.p(x)
        other = s.q(x)
        return {
            "a": s.head(F.relu(s.a(first)) + F.relu(s.b(first)) + F.relu(s.c(other))),
            "b": other.mean(dim=(2, 3)),
        }

    norms = {name: nn.BatchNorm2d(6) for name in "abc"}
    return Net(forward, p=conv(3, 6), q=conv(3, 6), head=head(), **norms)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.norm, self.q = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.norm(self.p(x)) * scale)
        return self.q(hidden), hidden


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
    )


def unused_layer() -> nn.Module:
    return Net(
        lambda s, x: s.q(s.norm(s.p(x))),
        p=nn.Linear(5, 6),
        norm=nn.BatchNorm1d(6),
        q=nn.Linear(6, 3),
        unused=nn.Linear(5, 5),
    )


def two_norms() -> nn.Module:
    """Linear maps between two layer norms: both factors of the product are invariant as wholes."""
    return nn.Sequential(
        nn.Linear(5, 6, bias=False),
        nn.Linear(6, 6, bias=False),
        nn.LayerNorm(6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


ROW = {"0.weight": "row"}
TENSOR = {"0.weight": "tensor"}
NOTHING: dict[str, str] = {}


def vectors() -> Tensor:
    return images(8, 5)


SUITE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, str]]] = {
    "conv-bn": (lambda: plain(nn.BatchNorm2d(6)), images, ROW),
    "conv-bias-bn": (lambda: plain(nn.BatchNorm2d(6), bias=True), images, ROW),
    "conv-bn-no-affine": (lambda: plain(nn.BatchNorm2d(6, affine=False)), images, ROW),
    "conv-bn-no-running-stats": (
        lambda: plain(nn.BatchNorm2d(6, track_running_stats=False)),
        images,
        ROW,
    ),
    "conv-relu-bn": (lambda: plain(nn.BatchNorm2d(6), between=nn.ReLU()), images, ROW),
    "conv-bias-relu-bn": (
        lambda: plain(nn.BatchNorm2d(6), bias=True, between=nn.ReLU()),
        images,
        NOTHING,
    ),
    "conv-gelu-bn": (lambda: plain(nn.BatchNorm2d(6), between=nn.GELU()), images, NOTHING),
    "conv-maxpool-bn": (lambda: plain(nn.BatchNorm2d(6), between=nn.MaxPool2d(2)), images, ROW),
    "conv-in": (lambda: plain(nn.InstanceNorm2d(6)), images, ROW),
    "conv-bias-in": (lambda: plain(nn.InstanceNorm2d(6, affine=True), bias=True), images, ROW),
    "conv-gn-groups": (lambda: plain(nn.GroupNorm(3, 6)), images, {"0.weight": "group"}),
    "conv-gn-channels": (lambda: plain(nn.GroupNorm(6, 6)), images, ROW),
    "conv-gn-one": (lambda: plain(nn.GroupNorm(1, 6)), images, TENSOR),
    "conv-bias-gn": (lambda: plain(nn.GroupNorm(2, 6), bias=True), images, NOTHING),
    "linear-bn": (lambda: mlp(nn.BatchNorm1d(6), bias=True), vectors, ROW),
    "linear-ln": (lambda: mlp(nn.LayerNorm(6), bias=False), vectors, TENSOR),
    "linear-bias-ln": (lambda: mlp(nn.LayerNorm(6), bias=True), vectors, NOTHING),
    "linear-rms": (lambda: mlp(nn.RMSNorm(6), bias=False), vectors, TENSOR),
    "linear-bias-rms": (lambda: mlp(nn.RMSNorm(6), bias=True), vectors, NOTHING),
    "mlp-without-norm": (lambda: mlp(nn.Identity(), bias=True), vectors, NOTHING),
    "product-before-ln": (two_norms, vectors, {"0.weight": "tensor", "1.weight": "tensor"}),
    "weight-norm": (weight_normed, vectors, {"0.parametrizations.weight.original1": "row"}),
    "residual-post-activation": (
        post_activation_residual,
        images,
        {"p.weight": "row", "q.weight": "row"},
    ),
    "residual-pre-activation": (pre_activation_residual, images, {"p.weight": "row"}),
    "dense-concatenation": (dense_concatenation, images, {"p.weight": "row", "q.weight": "row"}),
    "raw-skip": (raw_skip, images, NOTHING),
    "grouped": (lambda: grouped(2), images, {"0.weight": "row", "3.weight": "row"}),
    "depthwise": (lambda: grouped(6), images, {"0.weight": "row", "3.weight": "row"}),
    "tied": (tied, lambda: images(8, 6), ROW),
    "used-twice-normed": (
        lambda: used_twice(both_normed=True),
        images,
        {"stem.weight": "row", "p.weight": "row"},
    ),
    "used-twice-once-normed": (
        lambda: used_twice(both_normed=False),
        images,
        {"stem.weight": "row"},
    ),
    "bn-on-running-stats": (eval_mode, images, NOTHING),
    "functional-bn": (functional_norm, images, {"p.weight": "row"}),
    "two-branches": (branches, images, {"p.weight": "row"}),
    "two-inputs": (TwoInputs, lambda: (vectors(), torch.tensor(2.0)), {"p.weight": "row"}),
    "dropout": (dropout_net, vectors, ROW),
    "unused-layer": (unused_layer, vectors, {"p.weight": "row"}),
    "conv1d-bn": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
        ),
        lambda: images(6, 3, 8),
        ROW,
    ),
    "conv3d-bn": (
        lambda: nn.Sequential(
            nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
        ),
        lambda: images(6, 2, 3, 3, 3),
        ROW,
    ),
    "transposed-conv-bn": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), head()),
        images,
        TENSOR,
    ),
    "transformer-pre-ln": (Attention, lambda: images(4, 6, 5), NOTHING),
    "transformer-qk-norm-joint": (
        lambda: Attention(qk_norm=True),
        lambda: images(4, 6, 5),
        NOTHING,
    ),
    "transformer-qk-norm-split": (
        lambda: Attention(qk_norm=True, split=True),
        lambda: images(4, 6, 5),
        {"q.weight": "group", "k.weight": "group"},
    ),
    "vision-transformer": (VisionTransformer, images, NOTHING),
}


def build(name: str) -> tuple[nn.Module, Any, dict[str, str]]:
    """The network, its input and the expected kinds, from a fixed seed and away from the initial symmetry."""
    builder, example, expected = SUITE[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = builder()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return net, example(), copy.copy(expected)
