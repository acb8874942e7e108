"""``fisherfold info``: versions, devices and data found."""

from __future__ import annotations

import platform
from importlib import metadata

from fisherfold._version import __version__
from fisherfold.cli.voice import Voice


def info(voice: Voice) -> None:
    """Print versions, devices and the data sets that are found: what to put into a bug report."""
    import torch

    from fisherfold.datasets import REGISTRY, where
    from fisherfold.datasets.local import cache_folder

    facts = {
        "fisherfold": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    facts |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn", "polars")}
    facts["threads"] = str(torch.get_num_threads())
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts["devices"] = ", ".join(["cpu", *devices])
    found = {name: folder for name in sorted(REGISTRY) if (folder := where(name)) is not None}
    facts["data found"] = ", ".join(found) or "none"
    for name, folder in found.items():
        voice.detail(f"{name}: {folder}")
    voice.detail(f"cache: {cache_folder()}")
    voice.result("fisherfold on this machine", facts)
