r"""Try settings that act late in CIFAR training, all from one trunk, on validation images.

    PYTHONPATH=src python benchmarks/gpu/cifar_endings.py cifar100 vgg16bn mkfac-cutmix --seed 1 \
        --ending mixed_until=0.8 --ending mixed_until=0.9 --ending mixed_until=0.8,ascent=0.003,ascent_start=0.8

A run of 100 epochs with an ending of 20 and one of 10 takes 130 epochs where three whole runs take 300, and tells more:
the runs compared are the same up to where they part. Logs go to ``results/cifar/search``, as those of other trials.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fisherfold.training import ImagePool, Run, parse_setting, settings
from fisherfold.training.endings import train_endings
from fisherfold.training.train import pick_device


def main() -> None:
    """Train the trunk and its endings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("dataset", "model", "preset"):
        parser.add_argument(name)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ending", action="append", default=[], metavar="NAME=VALUE,…", help="settings to replace")
    parser.add_argument("--folder", type=Path, default=Path("results/cifar/search"))
    parser.add_argument("--minutes", type=float, default=25.0, help="when to stop")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--eager", action="store_true", help="do not compile the network")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    endings = [dict(parse_setting(word) for word in ending.split(",")) for ending in given.ending]
    pool = ImagePool.load(given.dataset, device=pick_device(given.device), split="validation")
    chosen = settings(given.preset, given.dataset, given.model)
    trunk = Run(chosen, given.model, pool, seed=given.seed, compiled=not given.eager)
    train_endings(trunk, endings, given.folder, until=until, say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
