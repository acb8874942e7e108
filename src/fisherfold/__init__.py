"""Maximum likelihood on manifolds with the Riemannian Fisher information.

The names here are the public API; everything else is reached through its package
(``fisherfold.manifolds``, ``fisherfold.fisher``, ``fisherfold.problems``, ``fisherfold.solvers``,
...). They are imported when first used, so that ``import fisherfold`` is quick and needs only what
is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fisherfold._version import __version__

if TYPE_CHECKING:
    from fisherfold import (
        completion,
        datasets,
        distributed,
        factors,
        fisher,
        manifolds,
        optim,
        problems,
        progress,
        solvers,
        subspace,
        testing,
    )
    from fisherfold.completion import (
        ImplicitCompletion,
        LowRankImputer,
        MatrixCompletion,
        MatrixCompletionCV,
    )
    from fisherfold.factors import FactorAnalysis
    from fisherfold.fisher import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
    from fisherfold.manifolds import check_retraction
    from fisherfold.optim import KFAC, MKFAC, SGDG, SphereOptimizer, find_scale_invariant
    from fisherfold.problems import (
        GaussianModel,
        LossProblem,
        NLLProblem,
        Problem,
        check_fisher,
        check_gradient,
    )
    from fisherfold.solvers import Result, minimize
    from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor

_HOMES = {
    name: home
    for home, names in {
        "completion": (
            "ImplicitCompletion",
            "LowRankImputer",
            "MatrixCompletion",
            "MatrixCompletionCV",
        ),
        "subspace": ("SubspaceClassifier", "SubspaceRegressor"),
        "factors": ("FactorAnalysis",),
        "problems": (
            "GaussianModel",
            "LossProblem",
            "NLLProblem",
            "Problem",
            "check_fisher",
            "check_gradient",
        ),
        "fisher": ("Bernoulli", "Categorical", "Gaussian", "Likelihood", "Poisson"),
        "manifolds": ("check_retraction",),
        "solvers": ("Result", "minimize"),
        "optim": ("KFAC", "MKFAC", "SGDG", "SphereOptimizer", "find_scale_invariant"),
    }.items()
    for name in names
}
_PACKAGES = ("datasets", "distributed", "progress", "testing", *dict.fromkeys(_HOMES.values()))

__all__ = [
    "KFAC",
    "MKFAC",
    "SGDG",
    "Bernoulli",
    "Categorical",
    "FactorAnalysis",
    "Gaussian",
    "GaussianModel",
    "ImplicitCompletion",
    "Likelihood",
    "LossProblem",
    "LowRankImputer",
    "MatrixCompletion",
    "MatrixCompletionCV",
    "NLLProblem",
    "Poisson",
    "Problem",
    "Result",
    "SphereOptimizer",
    "SubspaceClassifier",
    "SubspaceRegressor",
    "__version__",
    "check_fisher",
    "check_gradient",
    "check_retraction",
    "completion",
    "datasets",
    "distributed",
    "factors",
    "find_scale_invariant",
    "fisher",
    "manifolds",
    "minimize",
    "optim",
    "problems",
    "progress",
    "solvers",
    "subspace",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fisherfold.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"fisherfold.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fisherfold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
