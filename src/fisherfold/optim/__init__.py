"""Optimizers for networks with normalisation: Kronecker-factored curvature joined to the geometry of their weights."""

from fisherfold.optim.adamp import AdamP
from fisherfold.optim.invariance import Finding, find_scale_invariant
from fisherfold.optim.kfac import KFAC, SGDG
from fisherfold.optim.mkfac import MKFAC
from fisherfold.optim.scaling import ScaleAscent
from fisherfold.optim.sgdp import SGDP
from fisherfold.optim.structure import guess_from_structure
from fisherfold.optim.turning import RowAhead, RowAscent, RowNoise

__all__ = [
    "KFAC",
    "MKFAC",
    "SGDG",
    "SGDP",
    "AdamP",
    "Finding",
    "RowAhead",
    "RowAscent",
    "RowNoise",
    "ScaleAscent",
    "find_scale_invariant",
    "guess_from_structure",
]
