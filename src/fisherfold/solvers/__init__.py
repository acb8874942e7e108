"""One outer loop and the methods that run in it; a solver sees a Problem and never the data."""

from fisherfold.solvers.loop import METHODS, minimize
from fisherfold.solvers.rcg import RCG, RGD
from fisherfold.solvers.result import Result, Trace
from fisherfold.solvers.rngd import RNGD
from fisherfold.solvers.rsgd import RSGD
from fisherfold.solvers.rsvrg import RNGDVR, RSVRG
from fisherfold.solvers.state import State
from fisherfold.solvers.stopping import (
    Criterion,
    GradientNorm,
    LossBelow,
    MaxSamples,
    MaxSeconds,
    SmallGradient,
    Stagnation,
)

__all__ = [
    "METHODS",
    "RCG",
    "RGD",
    "RNGD",
    "RNGDVR",
    "RSGD",
    "RSVRG",
    "Criterion",
    "GradientNorm",
    "LossBelow",
    "MaxSamples",
    "MaxSeconds",
    "Result",
    "SmallGradient",
    "Stagnation",
    "State",
    "Trace",
    "minimize",
]  # fmt: skip
