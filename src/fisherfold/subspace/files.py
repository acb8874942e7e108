"""The state of a fitted multi-task estimator as plain arrays and values."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherfold.files import sound
from fisherfold.subspace.inputs import Scaling
from fisherfold.subspace.marginal import SubspacePrior
from fisherfold.subspace.predictive import TaskSpread
from fisherfold.subspace.tasks import TaskStatistics
from fisherfold.tables.folders import (
    expect,
    expect_number,
    load_folder,
    model_file,
    pack_index,
    save_folder,
    unpack_index,
)
from fisherfold.tables.validation import loaded_parameters, saved_parameters, storable

KIND = "subspace"
VERSION = 2
Model = TypeVar("Model")

# Shapes: d features, n with the intercept, p rank, T tasks, k = 1 + p and q = p, or both 0 where W
# is taken for known.
_ALWAYS = {"frame": "np", "weights": "Tn", "scaling.center": "d", "scaling.scale": "d"}
_PRIOR = {"mean": "n", "covariance": "pp", "noise": "T"}
_SPREAD = {
    "shared": "knkn",
    "moments": "Tkk",
    "covariance": "Tpp",
    "reach": "Tnq",
    "unseen": "pp",
    "noise": "T",
    "common": "1",
}
_STATISTICS = {"gram": "Tnn", "cross": "Tn", "power": "T", "sums": "T", "counts": "T"}
_POSITIVE = {"scaling.scale", "prior.noise", "spread.noise", "spread.common"}
_LARGEST = 1e150  # of features in the fit
_NUMBERS = ("log_likelihood_",)
_TEXTS = ("task_column_", "target_name_")


def to_state(
    model: Any, *, with_statistics: bool = True
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Take a fitted estimator apart."""
    scaling = model.scaling_
    tensors: dict[str, Any] = {
        "frame": model._frame,
        "weights": model._weights,
        "scaling.center": scaling.center,
        "scaling.scale": scaling.scale,
        "scaling.flat": scaling.flat.astype(np.int64),
    }
    if hasattr(model, "_prior"):
        tensors |= {f"prior.{name}": getattr(model._prior, name) for name in _PRIOR}
        tensors |= {f"spread.{name}": getattr(model._spread, name) for name in _SPREAD}
    statistics = getattr(model, "statistics_", None)
    if with_statistics and statistics is not None:
        tensors |= {f"statistics.{name}": getattr(statistics, name) for name in _STATISTICS}
    if hasattr(model, "ridge_"):
        tensors["ridge"] = np.array([model.ridge_])
    meta: dict[str, Any] = {
        "n_features_in": int(model.n_features_in_),
        "n_tasks": len(model._index),
        "n_iter": int(model.n_iter_),
        "offset": scaling.offset,
        "intercept": scaling.intercept,
        "outputs": bool(getattr(model, "_outputs", False)),
        "trace": model.trace_,
    }
    meta |= {name: getattr(model, name) for name in (*_NUMBERS, *_TEXTS) if hasattr(model, name)}
    if hasattr(model, "feature_names_in_"):
        meta["features"] = [str(name) for name in model.feature_names_in_]
    if hasattr(model, "classes_"):
        meta["classes"] = storable(model.classes_)
    if hasattr(model, "ridge_errors_"):
        meta["ridge_errors"] = [list(pair) for pair in model.ridge_errors_.items()]
    return {name: np.asarray(part) for name, part in tensors.items()} | pack_index(
        model._index, "tasks"
    ), meta


def restore(model: Any, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Set what ``to_state`` took; raises ``ValueError`` where parts do not fit."""
    tensors = {name: torch.as_tensor(part) for name, part in arrays.items()}
    sizes = {"d": expect_number(meta, "n_features_in", least=1, integer=True), "1": 1}
    sizes["T"] = expect_number(meta, "n_tasks", least=1, integer=True)
    if not isinstance(meta.get("intercept"), bool) or not isinstance(meta.get("outputs"), bool):
        raise ValueError("intercept and outputs must be true or false")
    sizes["n"] = sizes["d"] + int(meta["intercept"])
    sizes["p"] = expect(tensors, "frame", (sizes["n"], None)).shape[1]
    sizes["k"] = len(expect(tensors, "spread.shared")) if "spread.shared" in tensors else 0
    if sizes["k"] not in {0, 1 + sizes["p"]}:
        raise ValueError(
            f"the covariance of the shared parts has the size {sizes['k']}, not {1 + sizes['p']}"
        )
    sizes["q"] = max(sizes["k"] - 1, 0)

    def take(name: str, shape: str) -> Tensor:
        return expect(
            tensors, name, tuple(sizes[letter] for letter in shape), positive=name in _POSITIVE
        ).double()

    model._frame, model._weights, center, scale = (
        take(name, shape) for name, shape in _ALWAYS.items()
    )
    flat = expect(tensors, "scaling.flat", (sizes["d"],), integers=True).numpy().astype(bool)
    model.scaling_ = Scaling(
        center.numpy(), scale.numpy(), flat, expect_number(meta, "offset"), meta["intercept"]
    )
    model._index = unpack_index(tensors, "tasks", sizes["T"])
    model._outputs = meta["outputs"]
    model.n_features_in_ = sizes["d"]
    model.n_iter_ = expect_number(meta, "n_iter", least=0, integer=True)
    model.trace_ = _trace(meta.get("trace"))
    model.statistics_ = None
    if "prior.mean" in tensors:
        model._prior = SubspacePrior(
            frame=model._frame,
            **{name: take(f"prior.{name}", shape) for name, shape in _PRIOR.items()},
        )
        model._spread = TaskSpread(
            **{name: take(f"spread.{name}", shape) for name, shape in _SPREAD.items()}
        )
    if "statistics.gram" in tensors:
        model.statistics_ = TaskStatistics(
            *(take(f"statistics.{name}", part) for name, part in _STATISTICS.items())
        )
    if "ridge" in tensors:
        model.ridge_ = float(expect(tensors, "ridge", (1,), least=0))
    _restore_values(model, meta)
    _check_predictions(model)
    model._check_fitted()


def _check_predictions(model: Any) -> None:
    """Check that predictions for features from -1 to 1 are finite."""
    scaling = model.scaling_
    spread = getattr(model, "_spread", None)
    if min(scaling.scale) < 1 / _LARGEST or max(*scaling.scale, *abs(scaling.center)) > _LARGEST:
        raise ValueError(f"scaling must be from {1 / _LARGEST:g} to {_LARGEST:g}")
    z = torch.from_numpy(
        np.append((1 + abs(scaling.center)) / scaling.scale, [1.0] * scaling.intercept)
    )
    size = float(_sizes(model._weights) @ z) + abs(scaling.offset)
    if spread is not None:
        inside = model._frame.abs().mT @ z
        moved = z + _sizes(spread.reach) @ inside[: spread.reach.shape[-1]]
        k = len(spread.shared)
        shared = (_sizes(spread.moments).reshape(k, 1, k, 1) * spread.shared.abs()).sum((0, 2))
        own = inside @ (_sizes(spread.covariance) + spread.unseen.abs()) @ inside
        size += float(own + moved @ shared @ moved + spread.noise.max() + spread.common)
    if not size < 1e300:
        raise ValueError("its numbers are so large that predictions overflow")


def _sizes(tables: Tensor) -> Tensor:
    """The largest absolute values over the tasks."""
    return torch.linalg.vector_norm(tables, math.inf, dim=0)


def _restore_values(model: Any, meta: Mapping[str, Any]) -> None:
    for name in _NUMBERS:
        if name in meta:
            setattr(model, name, expect_number(meta, name))
    for name in _TEXTS:
        value = meta.get(name)
        if not isinstance(value, (str, type(None))):
            raise ValueError(f"{name} is {value!r}, a name is expected")
        setattr(model, name, value)
    if "features" in meta:
        names = meta["features"]
        good = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not good or len(names) != model.n_features_in_:
            raise ValueError("its features must be a name for each feature")
        model.feature_names_in_ = np.array(names, dtype=object)
    if "classes" in meta:
        classes = meta["classes"]
        if (
            not isinstance(classes, list)
            or len(classes) != 2
            or {type(c) for c in classes} - {str, int, float, bool}
        ):
            raise ValueError("its classes must be two texts or numbers")
        model.classes_ = np.array(classes)
    if "ridge_errors" in meta:
        model.ridge_errors_ = {float(ridge): float(error) for ridge, error in meta["ridge_errors"]}


def _trace(rows: Any) -> list[dict[str, float]]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("its trace must be a list of rows")
    return [
        {str(name): math.nan if value is None else float(value) for name, value in row.items()}
        for row in rows
    ]


def save_model(path: str | os.PathLike[str], model: Any, *, with_statistics: bool) -> None:
    """Write a fitted multi-task estimator into a folder."""
    arrays, meta = to_state(model, with_statistics=with_statistics)
    known = {
        "estimator": type(model).__name__,
        "params": saved_parameters(model.get_params(deep=False)),
    }
    save_folder(path, KIND, arrays, known | meta, version=VERSION)


def load_model(path: str | os.PathLike[str], *classes: type[Model]) -> Model:
    """Read a fitted multi-task estimator."""
    tensors, meta = load_folder(path, KIND, version=VERSION)
    cls: Any = next((c for c in classes if c.__name__ == meta.get("estimator")), None)
    if cls is None:
        raise ValueError(
            f"{path} holds a {meta.get('estimator')}, not a "
            f"{' or '.join(c.__name__ for c in classes)}"
        )
    with sound(model_file(path), KIND):
        model = cls(**loaded_parameters(meta.get("params"), cls.CHECKS))
        restore(model, tensors, meta)
    return cast("Model", model)
