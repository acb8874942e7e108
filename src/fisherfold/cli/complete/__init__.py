"""``fisherfold complete``: fill tables with holes, and recommend; one file per command."""
# ruff: noqa: I001

from fisherfold.cli.complete import (  # in the order of the help
    fit,
    predict,
    recommend,
    similar,
    explain,
    update,
    evaluate,
    export,
)
from fisherfold.cli.complete.options import app

__all__ = [
    "app",
    "evaluate",
    "explain",
    "export",
    "fit",
    "predict",
    "recommend",
    "similar",
    "update",
]
