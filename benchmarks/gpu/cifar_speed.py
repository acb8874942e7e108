"""Seconds per epoch of CIFAR training on one GPU: alone, compiled or not, and several runs side by side.

    PYTHONPATH=src python benchmarks/gpu/cifar_speed.py

Random images of CIFAR's size (50,000 training, 10,000 test): an epoch has augmentation, 390 steps of 128 images and the
test. Times are of whole epochs after a first one that compiles and captures; refreshes of the curvature are outside.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from fisherfold.datasets import Images
from fisherfold.training import ImagePool, Run, settings

GOALS = {("wrn16_4", "sgd"): 1.0, ("wrn16_4", "mkfac"): 1.1, ("vgg16bn", "sgd"): 0.8, ("vgg16bn", "mkfac"): 1.0}


def random_pool(device: str, images: int = 50_000) -> ImagePool:
    draw = np.random.default_rng(0)
    sizes = (images, images // 5)
    pixels = [draw.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for n in sizes]
    labels = [draw.integers(0, 10, n) for n in sizes]
    return ImagePool.of(Images(pixels[0], labels[0], pixels[1], labels[1]), "cifar10", device=device)


def epoch(runs: list[Run]) -> None:
    for run in runs:
        run.begin_epoch()
    for index in range(runs[0].steps_per_epoch):
        for run in runs:
            run.step(index)
    for run in runs:
        run.judge()
    for run in runs:
        run.end_epoch()


def measure(model: str, preset: str, count: int, compiled: bool, pool: ImagePool, epochs: int) -> None:
    start = time.perf_counter()
    runs = [Run(settings(preset, "cifar10", model), model, pool, seed=s, compiled=compiled) for s in range(count)]
    epoch(runs)
    first = time.perf_counter() - start
    times = []
    for _ in range(epochs):
        start = time.perf_counter()
        epoch(runs)
        times.append((time.perf_counter() - start) / count)
    seconds = sorted(times)[len(times) // 2]
    goal = GOALS.get((model, preset)) if count == 1 else None
    verdict = f"  goal {goal:.1f}: {'met' if seconds <= goal else 'missed'}" if goal else ""
    print(f"{model:8} {preset:6} {count:2}  {compiled!s:8} {seconds:7.3f} {first:9.1f}{verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", default="", help="MODEL/PRESET/COUNT/COMPILED,… such as vgg16bn/mkfac/2/1")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print("network  preset runs compiled  s/epoch/run  first epoch s")
    plan = [(m, p, 1, c) for m in ("wrn16_4", "vgg16bn") for p in ("sgd", "mkfac") for c in (False, True)]
    plan += [(m, p, k, True) for m in ("wrn16_4", "vgg16bn") for p in ("sgd", "mkfac") for k in (2, 4)]
    if arguments.only:
        cells = (cell.split("/") for cell in arguments.only.split(","))
        plan = [(m, p, int(k), bool(int(c))) for m, p, k, c in cells]
    pool = random_pool(arguments.device, arguments.images)
    for model, preset, count, compiled in plan:
        try:
            measure(model, preset, count, compiled, pool, arguments.epochs)
        except Exception as error:  # the other cells are still worth their time
            line = f"{model:8} {preset:6} {count:2}  {compiled!s:8} failed: {type(error).__name__}: {error}"
            print(line[:600], flush=True)


if __name__ == "__main__":
    main()
