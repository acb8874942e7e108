"""``fisherfold info``: versions, devices and data found."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fisherfold._version import __version__


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False) -> None:
    """Print versions, devices and the data sets that are found: what to put into a bug report.

    Example: `fisherfold info --json`
    """
    import torch

    from fisherfold.datasets import REGISTRY, where

    facts = {"fisherfold": __version__, "python": platform.python_version(), "platform": platform.platform()}
    facts |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn", "polars")}
    facts["threads"] = str(torch.get_num_threads())
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts["devices"] = ", ".join(["cpu", *devices])
    facts["data found"] = ", ".join(name for name in sorted(REGISTRY) if where(name) is not None) or "none"
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False)
    for key, value in facts.items():
        table.add_row(key, value)
    Console().print(table)
