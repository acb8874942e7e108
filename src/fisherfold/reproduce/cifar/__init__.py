"""The paper's table of CIFAR accuracies, assembled from logged runs: what was run, what was not, and what it says."""

from fisherfold.reproduce.cifar.cells import OPTIMIZERS, RESULTS, CellResult, cells
from fisherfold.reproduce.cifar.claims import CLAIM, against_paper, comparisons, judge, margins
from fisherfold.reproduce.cifar.page import section, table, text, write
from fisherfold.reproduce.cifar.searches import Beside, as_rows, beside, searches, trials

__all__ = [
    "CLAIM", "OPTIMIZERS", "RESULTS", "Beside", "CellResult", "against_paper", "as_rows", "beside", "cells",
    "comparisons", "judge", "margins", "searches", "section", "table", "text", "trials", "write",
]  # fmt: skip
