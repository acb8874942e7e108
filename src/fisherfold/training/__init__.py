"""Training the paper's networks on CIFAR: presets, data on the device, runs that resume, several side by side.

``train`` is the one function most people need; ``fisherfold train`` is its command line, and
``fisherfold reproduce cifar`` makes the paper's table of what it logged.
"""

from __future__ import annotations

from fisherfold.training.data import ImagePool
from fisherfold.training.log import RunLog, read_logs
from fisherfold.training.options import Settings, parse_setting
from fisherfold.training.presets import MODELS, PRESETS, preset_of, settings
from fisherfold.training.run import Run
from fisherfold.training.train import train

__all__ = [
    "MODELS", "PRESETS", "ImagePool", "Run", "RunLog", "Settings", "parse_setting", "preset_of", "read_logs",
    "settings", "train",
]  # fmt: skip
