"""torchvision's networks, also where its compiled operators do not fit the installed build of torch."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

KEPT = []


def torchvision_models() -> Any:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError)) if _declared() else None
    return importlib.import_module("torchvision.models")


def _declared() -> bool:
    """Declare the operators that torchvision expects its library to have."""
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        KEPT.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True
