"""Completion of tables with holes: ratings, their problem and Fisher operators, inference, estimators.

Names are imported when first used: a model of ratings needs none of the solvers that ``CompletionProblem`` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fisherfold.completion.blend import ImplicitBlend
    from fisherfold.completion.cross_validation import MatrixCompletionCV
    from fisherfold.completion.implicit import ImplicitCompletion
    from fisherfold.completion.imputation.imputer import LowRankImputer
    from fisherfold.completion.imputation.pooling import Pooled, pool_estimates
    from fisherfold.completion.item_to_item import ItemToItem
    from fisherfold.completion.point.problem import CompletionProblem
    from fisherfold.completion.rating_model import MatrixCompletion
    from fisherfold.completion.ratings import Ratings

_HOMES = {
    "CompletionProblem": "point.problem",
    "ImplicitBlend": "blend",
    "ImplicitCompletion": "implicit",
    "ItemToItem": "item_to_item",
    "LowRankImputer": "imputation.imputer",
    "MatrixCompletion": "rating_model",
    "MatrixCompletionCV": "cross_validation",
    "Pooled": "imputation.pooling",
    "Ratings": "ratings",
    "pool_estimates": "imputation.pooling",
}

__all__ = [
    "CompletionProblem",
    "ImplicitBlend",
    "ImplicitCompletion",
    "ItemToItem",
    "LowRankImputer",
    "MatrixCompletion",
    "MatrixCompletionCV",
    "Pooled",
    "Ratings",
    "pool_estimates",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
