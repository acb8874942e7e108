"""The price of an MKFAC step and of a refresh on one GPU, against fused SGD in the same process.

    PYTHONPATH=src python benchmarks/gpu/mkfac_step.py

WRN-16-4 and VGG16-BN, batch 128, synthetic CIFAR-shaped data, bf16 autocast, channels_last; the whole step (forward,
backward, optimizer) is one CUDA graph for SGD and for MKFAC. Rounds of replays alternate between the methods; ratios
are taken within a round, and their median and range are printed. Refreshes use 50 batches. Writes mkfac_step.json
into the folder $OUT, or the current one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fisherfold.optim.kfac import SGDG
from fisherfold.optim.mkfac import MKFAC
from fisherfold.optim.models import vgg16_bn, wide_resnet

STEPS_OF_A_RUN = 39_100  # 100 epochs of 391 steps, with refreshes at epochs 0, 30, 60 and 90
REFRESHES_OF_A_RUN = 4
GOALS = {("WRN-16-4", "automatic, fused"): 1.10, ("VGG16-BN", "truncated, fused"): 1.25, ("VGG16-BN", "full"): 2.0}


def images(batch: int, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth random images, whose patches have a decaying spectrum like those of photographs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(batch, 3, 8, 8, generator=generator)
    x = nn.functional.interpolate(coarse, size=32, mode="bicubic") + 0.1 * torch.randn(
        batch, 3, 32, 32, generator=generator
    )
    y = torch.randint(10, (batch,), generator=generator)
    return x.to(device).contiguous(memory_format=torch.channels_last), y.to(device)


class Trainer:
    """One network, one optimizer, and its step as a captured graph (a plain function on a CPU)."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module, torch.Tensor], Any],
        device: str,
        batch: int,
    ):
        torch.manual_seed(0)
        self.device = device
        self.model = build().to(device).to(memory_format=torch.channels_last)
        self.x, self.y = images(batch, device, 0)
        self.optimizer = optimizer(self.model, self.x)
        self.loss_fn = nn.CrossEntropyLoss()
        self.batches = [images(batch, device, seed) for seed in range(1, 51)]
        self.refresh_seconds: list[float] = []
        if isinstance(self.optimizer, MKFAC) and self.optimizer.uses_curvature:
            self.refresh()
        self.replay = self.capture()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)

    def step(self) -> None:
        with self.autocast():
            loss = self.loss_fn(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()

    def refresh(self) -> None:
        synchronise(self.device)
        start = time.perf_counter()
        with self.autocast():
            self.optimizer.refresh(self.batches, self.loss_fn)
        synchronise(self.device)
        self.refresh_seconds.append(time.perf_counter() - start)

    def capture(self) -> Callable[[], None]:
        if self.device == "cpu":

            def eager() -> None:
                self.optimizer.zero_grad(set_to_none=True)
                self.step()

            return eager
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                self.optimizer.zero_grad(set_to_none=True)
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def milliseconds(self, replays: int) -> float:
        self.replay()
        synchronise(self.device)
        start = time.perf_counter()
        for _ in range(replays):
            self.replay()
        synchronise(self.device)
        return 1e3 * (time.perf_counter() - start) / replays


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def sgd(model: nn.Module, _: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)


def sgdg(model: nn.Module, x: torch.Tensor, fuse: bool = False) -> torch.optim.Optimizer:
    shared = {"weight_decay": 5e-4, "example_input": x[:8].float(), "capturable": True, "fuse": fuse}
    return SGDG(model, lr=0.05, manifold_lr=0.05, **shared)


def sgdg_fused(model: nn.Module, x: torch.Tensor) -> torch.optim.Optimizer:
    return sgdg(model, x, fuse=True)


def mkfac(damping: float, **options: Any) -> Callable[[nn.Module, torch.Tensor], torch.optim.Optimizer]:
    def build(model: nn.Module, x: torch.Tensor) -> torch.optim.Optimizer:
        shared = {"weight_decay": 5e-4, "damping": damping, "capturable": True, "factor_decay": 0.0}
        return MKFAC(model, lr=0.05, manifold_lr=0.05, example_input=x[:8].float(), **shared, **options)

    return build


def methods(damping: float, quick: bool) -> dict[str, Callable[[nn.Module, torch.Tensor], torch.optim.Optimizer]]:
    found = {
        "Riemannian SGD": sgdg,
        "Riem. SGD, fused": sgdg_fused,
        "truncated": mkfac(damping, basis=1 / 16),
        "truncated, fused": mkfac(damping, basis=1 / 16, fuse=True),
        "automatic": mkfac(damping),
        "automatic, fused": mkfac(damping, fuse=True),
        "factored": mkfac(damping, damping_mode="factored"),
        "full": mkfac(damping, basis="full"),
    }
    return {name: found[name] for name in ("Riemannian SGD", "truncated")} if quick else found


def packed_bytes(optimizer: MKFAC) -> int:
    """What the two symmetric factors of every weight take in float32."""
    return 4 * sum(m * m + n * n for m, n in (t.sizes for t in optimizer.curvature.weights))


def unit_error(optimizer: MKFAC) -> float:
    return max(
        float((p.detach().reshape(s, -1).float().norm(dim=1) - 1).abs().max()) for p, _, s in optimizer._entries() if s
    )


def measure(
    name: str, build: Callable[[], nn.Module], damping: float, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    device, rows = arguments.device, []
    baseline = Trainer(build, sgd, device, arguments.batch)
    for method, make in methods(damping, arguments.quick).items():
        row: dict[str, Any] = {"network": name, "method": method, "damping": damping}
        rows.append(row)
        try:
            trainer = Trainer(build, make, device, arguments.batch)
            ratios, times, base = [], [], []
            for _ in range(arguments.rounds):
                base.append(baseline.milliseconds(arguments.replays))
                times.append(trainer.milliseconds(arguments.replays))
                ratios.append(times[-1] / base[-1])
            row |= {
                "sgd_ms": statistics.median(base),
                "ms": statistics.median(times),
                "ratio": statistics.median(ratios),
            }
            row |= {
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
                "unit_row_error": unit_error(trainer.optimizer),
            }
            if trainer.optimizer.uses_curvature:
                add_curvature(row, trainer, base)
            del trainer
        except Exception as error:  # a benchmark on a bare machine reports what it could not run
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        if device == "cuda":
            torch.cuda.empty_cache()
        print(line(row), flush=True)
    return rows


def add_curvature(row: dict[str, Any], trainer: Trainer, base: list[float]) -> None:
    optimizer = trainer.optimizer
    if row["method"] != "full":  # a second full eigendecomposition would only cost time
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.refresh()
            trainer.milliseconds(3)
        row["refresh_warnings"] = [str(w.message)[:200] for w in caught]
    trainer.optimizer.zero_grad(set_to_none=True)
    with trainer.autocast():
        trainer.loss_fn(trainer.model(trainer.x), trainer.y).backward()
    found = optimizer.diagnostics()
    state = sum(layer.bytes() for layer in optimizer.curvature.layers.values())
    row |= {
        "refresh_s": trainer.refresh_seconds,
        "curvature_bytes": state,
        "packed_bytes": packed_bytes(optimizer),
        "memory_ratio": state / packed_bytes(optimizer),
        "weights": len(found),
        "least_cosine": min(d.cosine for d in found.values()),
        "worst_truncation": max(d.error for d in found.values()),
    }
    extra = REFRESHES_OF_A_RUN * trainer.refresh_seconds[-1] * 1e3 / STEPS_OF_A_RUN
    row["ratio_at_paper_cadence"] = row["ratio"] + extra / statistics.median(base)


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['network']:9} {row['method']:17} failed: {row['failed']}"
    text = f"{row['network']:9} {row['method']:17} {row['sgd_ms']:7.3f} {row['ms']:7.3f}  "
    text += f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
    if "memory_ratio" in row:
        text += f"  {row['ratio_at_paper_cadence']:.3f}  {row['refresh_s'][-1]:7.2f}  {row['memory_ratio']:.2f}"
        text += f"  {row['least_cosine']:.3f}  {row['worst_truncation']:.3f}"
    goal = GOALS.get((row["network"], row["method"]))
    return text + (f"  goal {goal:.2f}: {'met' if row['ratio'] <= goal else 'missed'}" if goal else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="two methods only")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, batch {arguments.batch}, {time.strftime('%Y-%m-%d')}")
    print(
        "network   method             SGD ms      ms  ratio (range)          at cadence  refresh s  memory  cos  error"
    )
    rows = measure("WRN-16-4", lambda: wide_resnet(16, 4), 1.0, arguments)
    rows += measure("VGG16-BN", vgg16_bn, 2.0, arguments)
    target = Path(os.environ.get("OUT", ".")) / "mkfac_step.json"
    target.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))
    print(f"written: {target}")


if __name__ == "__main__":
    main()
