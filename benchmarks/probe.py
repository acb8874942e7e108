"""What the probe for scale-invariant weights costs and finds, beside the guess from the structure.

    OMP_NUM_THREADS=1 python benchmarks/probe.py [--networks resnet18,...]

Networks of torchvision (or timm) with random weights and one seed, two images of 224 by 224; CPU seconds of one thread.
Printed are the forward passes of the probe, its seconds, those of the guess, and the weights on spheres by each.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from fisherfold.optim.invariance import find_scale_invariant, guess_from_structure

NETWORKS = (
    "resnet18,resnet50,densenet121,regnet_y_400mf,efficientnet_b0,mobilenet_v3_small,nf_resnet26"
)


def build(name: str) -> torch.nn.Module:
    library = torch.library.Library(
        "torchvision", "FRAGMENT"
    )  # its own may not fit this build of torch
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    models = importlib.import_module("torchvision.models")
    make = getattr(models, name, None)
    return make() if make else importlib.import_module("timm").create_model(name)


def counted(forward: Callable[..., Any], passes: list[None]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        passes.append(None)
        return forward(*given)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default=NETWORKS)
    torch.set_num_threads(1)
    for name in parser.parse_args().networks.split(","):
        torch.manual_seed(0)
        network, passes, times = build(name), [], [time.process_time()]
        guess = guess_from_structure(network)
        times.append(time.process_time())
        kind = type(network)
        with mock.patch.object(kind, "forward", counted(kind.forward, passes)):
            found = find_scale_invariant(network, torch.randn(2, 3, 224, 224))
        times.append(time.process_time())
        guessed, probed = ({n for n, f in kinds.items() if f.spheres} for kinds in (guess, found))
        counts = (
            f"{len(probed)} by the probe, {len(guessed)} guessed, {len(probed & guessed)} by both"
        )
        matrices = sum(p.ndim > 1 for p in network.parameters())
        seconds = f"{times[2] - times[1]:5.2f} s, guess {times[1] - times[0]:.2f} s"
        print(
            f"{name:20} {len(passes):3} passes in {seconds}; of {matrices} weights {counts}",
            flush=True,
        )


if __name__ == "__main__":
    main()
