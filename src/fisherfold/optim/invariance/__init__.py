"""Which weights of a network are scale invariant, measured by a probe."""

from fisherfold.optim.invariance.finding import Finding
from fisherfold.optim.invariance.probe import find_scale_invariant

__all__ = ["Finding", "find_scale_invariant"]
