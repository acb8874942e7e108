"""The price of a training step on a CPU: our directions and MKFAC over SGD.

A convolutional network with batch norm (32 to 128 channels, 32×32 images, batch 32); factors are
collected every ten steps. Methods take turns in rounds of ten steps; the ratio to SGD is taken
within each round, and its median and range are printed. Peers: plain K-FAC hooks (all patches, full
eigendecompositions, as in kfac-pytorch and KFAC-Pytorch), SINGD and curvlinops (a fresh operator
every ten steps, exact damping), each where it is installed.

Against: SGD, AdamW, plain K-FAC hooks, SINGD, curvlinops
Takes: three minutes
Page: docs/benchmarks/networks.md
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._common import left_out
from fisherfold.optim import MKFAC, SphereOptimizer

SMOKE = "--rounds 1 --batch 2 --damping 0.1"

INTERVAL = 10
GOALS = {"SphereOptimizer, natural": 1.20, "MKFAC": 1.20}


def network() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

    pool = nn.MaxPool2d(2)
    layers = [
        *block(3, 32),
        *block(32, 64),
        pool,
        *block(64, 128),
        pool,
        *block(128, 128),
        nn.AdaptiveAvgPool2d(1),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def batches(count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        coarse = torch.randn(size, 3, 8, 8, generator=generator)
        x = F.interpolate(coarse, size=32, mode="bicubic") + 0.1 * torch.randn(
            size, 3, 32, 32, generator=generator
        )
        found.append((x, torch.randint(10, (size,), generator=generator)))
    return found


def first_order(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[int, Tensor, Tensor], None]:
    def step(_: int, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def plain_hooks(model: nn.Module, damping: float) -> Callable[[int, Tensor, Tensor], None]:
    """K-FAC as it is usually written.

    Module hooks, every patch, two full eigendecompositions per layer.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    factors: dict[nn.Module, list[Tensor]] = {m: [torch.zeros(()), torch.zeros(())] for m in layers}
    bases: dict[nn.Module, tuple[Tensor, ...]] = {}
    active = [False]

    def save_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if active[0]:
            a = inputs[0].detach()
            if isinstance(layer, nn.Conv2d):
                a = F.unfold(
                    a, layer.kernel_size, padding=layer.padding, stride=layer.stride
                ).transpose(1, 2)
            else:
                a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
            a = a.reshape(-1, a.shape[-1])
            factors[layer][0] = 0.95 * factors[layer][0] + 0.05 * (a.T @ a) / len(inputs[0])

    def save_gradient(layer: nn.Module, _: Any, outputs: tuple[Tensor, ...]) -> None:
        if active[0]:
            g = outputs[0].detach() * len(outputs[0])
            g = g.flatten(2).transpose(1, 2).reshape(-1, g.shape[1]) if g.ndim == 4 else g
            factors[layer][1] = 0.95 * factors[layer][1] + 0.05 * (g.T @ g) / len(g)

    for layer in layers:
        layer.register_forward_pre_hook(save_input)
        layer.register_full_backward_hook(save_gradient)

    def step(index: int, x: Tensor, y: Tensor) -> None:
        active[0] = index % INTERVAL == 0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for layer in layers:
            if active[0]:
                bases[layer] = (
                    *torch.linalg.eigh(factors[layer][0]),
                    *torch.linalg.eigh(factors[layer][1]),
                )
            d_a, q_a, d_g, q_g = bases[layer]
            gradient = layer.weight.grad.flatten(1)
            if layer.bias is not None:
                gradient = torch.cat([gradient, layer.bias.grad[:, None]], dim=1)
            v = q_g @ ((q_g.T @ gradient @ q_a) / (d_g[:, None] * d_a + damping)) @ q_a.T
            if layer.bias is not None:
                layer.bias.grad.copy_(v[:, -1])
                v = v[:, :-1]
            layer.weight.grad.copy_(v.reshape(layer.weight.shape))
        optimizer.step()

    return step


def singd(model: nn.Module, damping: float) -> Callable[[int, Tensor, Tensor], None]:
    from singd.optim.optimizer import SINGD

    preconditioned = SINGD(
        model, lr=0.003, momentum=0.9, damping=damping, T=INTERVAL, warn_unsupported=False
    )
    rest = [p for name, p in model.named_parameters() if p.ndim == 1 and "13" not in name]
    norms = torch.optim.SGD(rest, lr=0.01, momentum=0.9)  # it does not train batch norm

    def step(_: int, x: Tensor, y: Tensor) -> None:
        preconditioned.zero_grad()
        norms.zero_grad()
        F.cross_entropy(model(x), y).backward()
        preconditioned.step()
        norms.step()

    return step


def curvlinops(model: nn.Module, damping: float) -> Callable[[int, Tensor, Tensor], None]:
    from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    parameters = [p for m in layers for p in m.parameters()]
    held: list[Any] = [None]

    def step(index: int, x: Tensor, y: Tensor) -> None:
        if index % INTERVAL == 0:
            options = {
                "fisher_type": "empirical",
                "check_deterministic": False,
                "separate_weight_and_bias": False,
            }
            operator = KFACLinearOperator(
                model, nn.CrossEntropyLoss(), parameters, [(x, y)], **options
            )
            held[0] = KFACInverseLinearOperator(operator, damping=damping, use_exact_damping=True)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter, v in zip(parameters, held[0] @ [p.grad for p in parameters], strict=True):
            parameter.grad.copy_(v)
        optimizer.step()

    return step


def methods(damping: float, x: Tensor) -> dict[str, Callable[[int, Tensor, Tensor], None]]:
    torch.manual_seed(0)
    base = network()

    def fresh() -> nn.Module:
        return copy.deepcopy(base)

    model = fresh()
    found = {"SGD": first_order(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))}
    for direction in ("gradient", "spectral", "natural"):
        model = fresh()
        optimizer = SphereOptimizer(model, lr=0.01, direction=direction, every=INTERVAL)
        found[f"SphereOptimizer, {direction}"] = first_order(model, optimizer)
    model = fresh()
    found["MKFAC"] = first_order(
        model, MKFAC(model, damping=damping, every=INTERVAL, example_input=x)
    )
    found["plain K-FAC hooks"] = plain_hooks(fresh(), damping)
    for name, make in (("SINGD", singd), ("curvlinops", curvlinops)):
        try:
            found[name] = make(fresh(), damping)
        except ImportError as error:
            print(f"{name}: {left_out(error)}")
    return found


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--damping", type=float, default=0.01)


def main(given: Namespace) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    data = batches(INTERVAL, given.batch)
    found = methods(given.damping, data[0][0])
    ratios: dict[str, list[float]] = {name: [] for name in found}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for step in found.values():  # one uncounted round each
        for index, (x, y) in enumerate(data * 2):
            step(index, x, y)
    for number in range(given.rounds):
        for name, step in found.items():
            start = time.process_time()
            for index, (x, y) in enumerate(data):
                step(index + (number + 1) * INTERVAL, x, y)
            seconds[name].append((time.process_time() - start) / INTERVAL)
            ratios[name].append(seconds[name][-1] / seconds["SGD"][-1])
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), "
        f"{time.strftime('%Y-%m-%d')}"
    )
    print(
        f"batch {given.batch}, λ {given.damping:g}, {given.rounds} rounds of {INTERVAL} steps, CPU "
        "time"
    )
    print(f"{'method':26} ms/step  over SGD (range)")
    for name in found:
        goal = GOALS.get(name)
        middle = statistics.median(ratios[name])
        verdict = ""
        if goal is not None:
            verdict = f"  goal {goal:.2f}: {'met' if middle <= goal else 'missed'}"
        spread = f"{middle:.3f} ({min(ratios[name]):.3f}-{max(ratios[name]):.3f})"
        print(f"{name:26} {1e3 * statistics.median(seconds[name]):7.1f}  {spread}{verdict}")
