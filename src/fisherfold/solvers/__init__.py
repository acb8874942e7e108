"""One outer loop and the methods that run in it; a solver sees a Problem and never the data."""

from fisherfold.solvers.constrained import ConstrainedResult, minimize_constrained
from fisherfold.solvers.lbfgs import LBFGS
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
from fisherfold.solvers.trust_region import TrustRegion

__all__ = [
    "LBFGS",
    "METHODS",
    "RCG",
    "RGD",
    "RNGD",
    "RNGDVR",
    "RSGD",
    "RSVRG",
    "ConstrainedResult",
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
    "TrustRegion",
    "minimize",
    "minimize_constrained",
]
