"""torchvision's networks, also where its compiled operators do not fit the installed build of torch."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

KEPT = []


def torchvision_models() -> Any:
    declare()
    pytest.importorskip("torchvision")
    return importlib.import_module("torchvision.models")


def declare() -> None:
    """Declare the operators that torchvision expects its library to have."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)
