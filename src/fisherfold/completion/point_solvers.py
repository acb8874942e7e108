"""The former home of ``SOLVERS``, until the estimator imports it from ``point``."""

from fisherfold.completion.point import SOLVERS

__all__ = ["SOLVERS"]
