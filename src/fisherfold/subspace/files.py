"""Model files of the multi-task estimators: a folder with ``model.safetensors`` and, for people, ``model.json``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fisherfold._version import __version__
from fisherfold.distributed import Axis
from fisherfold.files import MODEL, model_folder, read_tensors, sound, write_atomically, write_tensors
from fisherfold.plain import counted
from fisherfold.subspace.marginal import SubspacePrior
from fisherfold.subspace.marginal_fit import common_noise
from fisherfold.subspace.spread import TaskSpread
from fisherfold.subspace.task_rows import Scaling
from fisherfold.subspace.tasks import TaskStatistics
from fisherfold.tables.id_files import from_json, to_json
from fisherfold.tables.ids import IdIndex, id_array
from fisherfold.tables.parameters import storable
from fisherfold.tables.posterior_files import check_trace, finite_number, take

_STATISTICS = ("gram", "cross", "power", "sums", "counts")
KIND, VERSION = "subspace", 1
_PRIOR = ("mean", "covariance", "noise")
_SPREAD = {"covariance": "spread"}  # the others are named after it; files of earlier versions have this one alone
_OPTIONAL = ("ridge_", "ridge_errors_", "_common_noise", "_outputs", "feature_names_in_", "classes_")
Model = TypeVar("Model")


def save_model(
    path: str | os.PathLike[str], model: Any, *, with_statistics: bool, columns: dict[str, Any] | None = None
) -> None:
    """Write a fitted multi-task estimator.

    Args:
        path: the folder; it is made if it does not exist.
        model: the estimator.
        with_statistics: keep the statistics of the rows.
        columns: what the columns of the table stand for, if it was fitted to a file.
    """
    scaling = model.scaling_
    tensors = {
        "frame": model._frame,
        "weights": model._weights,
        "scaling.center": torch.from_numpy(np.array(scaling.center)),
        "scaling.scale": torch.from_numpy(np.array(scaling.scale)),
    }
    if hasattr(model, "_spread"):
        tensors |= {_SPREAD.get(name, f"spread.{name}"): value for name, value in vars(model._spread).items()}
    if hasattr(model, "_prior"):
        tensors |= {f"prior.{name}": getattr(model._prior, name) for name in _PRIOR}
    statistics = getattr(model, "statistics_", None)
    if with_statistics and statistics is not None:
        tensors |= {f"statistics.{name}": getattr(statistics, name) for name in _STATISTICS}
    header = _header(model, scaling) | ({} if columns is None else {"columns": columns})
    with model_folder(path, KIND) as folder:
        write_tensors(folder / MODEL, tensors, kind=KIND, version=VERSION, header=header)
        shown = {"kind": KIND, "version": VERSION, **header} | {"trace": counted(len(header["trace"]), "row")}
        write_atomically(folder / "model.json", json.dumps(shown, indent=1).encode())


def _header(model: Any, scaling: Scaling) -> dict[str, Any]:
    return {
        "estimator": type(model).__name__,
        "fisherfold": __version__,
        "params": {name: storable(value) for name, value in model.get_params().items() if name != "checkpoint"},
        "offset": scaling.offset,
        "intercept": scaling.intercept,
        "flat": np.flatnonzero(scaling.flat).tolist(),
        "tasks": [to_json(label, "tasks") for label in model.task_ids_.tolist()],
        "n_features_in": int(model.n_features_in_),
        "n_iter": int(model.n_iter_),
        "trace": model.trace_,
        "fitted": {name: storable(getattr(model, name)) for name in _OPTIONAL if hasattr(model, name)},
    }


def load_model(path: str | os.PathLike[str], *classes: type[Model]) -> Model:
    """Read a fitted multi-task estimator.

    Args:
        path: the folder.
        *classes: what it may be.

    Returns:
        The estimator; ``_columns`` says what the columns of its table stand for, if it was fitted to a file.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if the folder holds another estimator, or one that does not hold together.
    """
    if not Path(path).is_dir():
        raise FileNotFoundError(f"there is no model folder {path}")
    file = Path(path) / MODEL
    tensors, header = read_tensors(file, kind=KIND, version=VERSION)
    cls = next((c for c in classes if c.__name__ == header.get("estimator")), None)
    if cls is None:
        raise ValueError(f"{path} holds a {header.get('estimator')}, not a {' or '.join(c.__name__ for c in classes)}")
    with sound(file, KIND):
        model: Any = cls(**header["params"])
        features = header["n_features_in"]
        if not isinstance(features, int) or features < 1 or not isinstance(header["intercept"], bool):
            raise ValueError(f"it claims {features!r} features and intercept {header['intercept']!r}")
        center, scale = (take(tensors, f"scaling.{name}", (features,)).numpy() for name in ("center", "scale"))
        offset, flat = finite_number("offset", header["offset"]), _flat(header.get("flat", []), features)
        model.scaling_ = Scaling(center, scale, offset, header["intercept"], flat)
        model.n_features_in_, model.trace_ = features, check_trace(header["trace"])
        model.n_iter_ = int(finite_number("n_iter", header["n_iter"], least=0))
        model._index = _tasks(header["tasks"])
        for name, value in header["fitted"].items():
            if name not in _OPTIONAL:
                raise ValueError(f"it sets {name!r}")
            setattr(model, name, _fitted(name, value))
        _restore(model, tensors, features + int(header["intercept"]), len(header["tasks"]))
        model._columns = header.get("columns")
        model._check_loaded()
    return cast("Model", model)


def _flat(places: Any, features: int) -> NDArray[np.bool_]:
    """Which features were constant, from their places; files of earlier versions do not say."""
    if not isinstance(places, list) or not all(type(place) is int and 0 <= place < features for place in places):
        raise ValueError(f"its constant features are {places!r}, places from 0 to {features - 1} are expected")
    return np.isin(np.arange(features), places)


def _tasks(labels: list[Any]) -> IdIndex:
    """The ids of the tasks, in the order of their numbers."""
    return IdIndex.restore(id_array([from_json(label) for label in labels], "task"))


def _restore(model: Any, tensors: dict[str, Tensor], n: int, tasks: int) -> None:
    rank = take(tensors, "frame", None).shape[-1]
    model._frame = take(tensors, "frame", (n, rank))
    model._set_coefficients(take(tensors, "weights", (tasks, n)))
    if "prior.mean" in tensors:
        shapes = {"mean": (n,), "covariance": (rank, rank), "noise": (tasks,)}
        prior = {name: take(tensors, f"prior.{name}", shape) for name, shape in shapes.items()}
        model._prior = SubspacePrior(frame=model._frame, **prior)
        model.prior_covariance_ = model._prior.covariance.numpy()
        model._spread = _restore_spread(tensors, model, tasks)
        model.noise_variance_ = model._spread.noise.numpy()
    model.statistics_ = None
    if "statistics.gram" in tensors:
        sizes = (tasks, n, n), (tasks, n), (tasks,), (tasks,), (tasks,)
        named = zip(_STATISTICS, sizes, strict=True)
        model.statistics_ = TaskStatistics(*(take(tensors, f"statistics.{name}", shape) for name, shape in named))


def _restore_spread(tensors: dict[str, Tensor], model: Any, tasks: int) -> TaskSpread:
    n, rank = model._frame.shape
    covariance = take(tensors, "spread", (tasks, rank, rank))
    if "spread.shared" not in tensors:
        common = common_noise(model._prior.noise, model.noise, Axis.whole(tasks))
        return TaskSpread.of_known(model._prior, covariance, common)
    size = len(take(tensors, "spread.shared", None))
    if size not in {0, 1 + rank}:
        raise ValueError(f"what is not known of the shared parts has the size {size}, not {1 + rank}")
    shapes = {"shared": (size, n, size, n), "moments": (tasks, size, size), "unseen": (rank, rank)}
    shapes |= {"noise": (tasks,), "common": (1,)}
    # files of earlier versions do not have it
    tensors = {"spread.reach": covariance.new_zeros((tasks, n, 0))} | tensors
    columns = take(tensors, "spread.reach", None).shape[-1]
    if columns not in {0, max(size - 1, 0)}:
        raise ValueError(f"the reach of its rows has {columns} columns, not {max(size - 1, 0)}")
    shapes["reach"] = (tasks, n, columns)
    return TaskSpread(
        covariance=covariance, **{name: take(tensors, f"spread.{name}", shape) for name, shape in shapes.items()}
    )


def _fitted(name: str, value: Any) -> Any:
    if name == "ridge_errors_":
        return {float(key): float(entry) for key, entry in value.items()}
    if name == "ridge_":
        return np.array([float(v) for v in value]) if isinstance(value, list) else finite_number(name, value)
    if name == "_common_noise":
        return finite_number(name, value, least=0)
    if name == "_outputs":
        if not isinstance(value, bool):
            raise ValueError(f"_outputs is {value!r}")
        return value
    if not isinstance(value, list) or not all(isinstance(v, (str, int, float)) for v in value):
        raise ValueError(f"{name} must be a list of names or numbers")
    return np.array(value, dtype=object if name == "feature_names_in_" else None)
