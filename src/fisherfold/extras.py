"""Packages that only some users need, and what to install where one of them is missing."""

from __future__ import annotations

from importlib.util import find_spec

# the extra of fisherfold that brings each package
EXTRAS = {
    "matplotlib": "plots",
    "pooch": "download",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}


def need(package: str) -> None:
    """Raise ``ModuleNotFoundError`` with the command that installs a package, if it is missing.

    Examples:
        >>> need("matplotlib")
    """
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{package} is needed here and is not installed: pip install "
            f"'fisherfold[{EXTRAS[package]}]'",
            name=package,
        )
