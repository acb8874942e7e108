"""Several processes, one fit.

Who holds which samples, how partial sums are joined, and who is missing.
"""

from fisherfold.distributed.axis import Axis, balanced_cuts
from fisherfold.distributed.group import ALONE, Content, Group, RankLost, current_group
from fisherfold.distributed.launch import TIMEOUT, joined, under_torchrun

__all__ = [
    "ALONE",
    "TIMEOUT",
    "Axis",
    "Content",
    "Group",
    "RankLost",
    "balanced_cuts",
    "current_group",
    "joined",
    "under_torchrun",
]
