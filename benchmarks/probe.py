"""What the probe of scale invariance costs on published architectures.

Networks of torchvision (or timm) with random weights and one seed, two images of 224 by 224; CPU
seconds of one thread. Printed are the forward passes of the probe, its seconds, and the number of
weights that are scale invariant.

Against: nothing
Takes: ten minutes
Page: docs/benchmarks/networks.md
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks._common import names, peer
from benchmarks.cifar import models as cifar
from fisherfold.optim.invariance import find_scale_invariant

SMOKE = "--networks wrn10_1"

NETWORKS = (
    "resnet18",
    "resnet50",
    "densenet121",
    "regnet_y_400mf",
    "efficientnet_b0",
    "mobilenet_v3_small",
    "nf_resnet26",
)


def build(name: str) -> torch.nn.Module:
    if name.startswith("wrn"):
        return cifar.build(name, 10)
    # torchvision's own library may not fit this build of torch
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    models = peer("torchvision.models")
    make = getattr(models, name, None)
    return make() if make else peer("timm").create_model(name)


def counted(forward: Callable[..., Any], passes: list[None]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        passes.append(None)
        return forward(*given)

    return run


def options(parser: ArgumentParser) -> None:
    help_ = "of torchvision, timm or benchmarks/cifar/models.py"
    parser.add_argument("--networks", type=names, default=NETWORKS, help=help_)


def main(given: Namespace) -> None:
    for name in given.networks:
        torch.manual_seed(0)
        network = build(name)
        passes = []
        times = [time.process_time()]
        kind = type(network)
        with mock.patch.object(kind, "forward", counted(kind.forward, passes)):
            found = find_scale_invariant(network, torch.randn(2, 3, 224, 224))
        times.append(time.process_time())
        probed = sum(f.spheres > 0 for f in found.values())
        matrices = sum(p.ndim > 1 for p in network.parameters())
        seconds = f"{times[1] - times[0]:5.2f} s"
        print(
            f"{name:20} {len(passes):3} passes in {seconds}; of {matrices} weights {probed} are "
            "invariant",
            flush=True,
        )
