"""The paper's table of CIFAR accuracies, assembled from logged runs: what was run, what was not, and what it says."""

from fisherfold.experiments.cifar.cells import OPTIMIZERS, RESULTS, CellResult, as_rows, cells, trials
from fisherfold.experiments.cifar.claims import CLAIM, comparisons, judge, margins
from fisherfold.experiments.cifar.page import section, table, text, write

__all__ = [
    "CLAIM", "OPTIMIZERS", "RESULTS", "CellResult", "as_rows", "cells", "comparisons", "judge", "margins", "section",
    "table", "text", "trials", "write",
]  # fmt: skip
