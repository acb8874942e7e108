"""Model files of the multi-task estimators: a folder with ``model.safetensors`` and, for people, ``model.json``."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fisherfold._version import __version__
from fisherfold.estimators.ids import IdIndex, id_array, plain
from fisherfold.estimators.task_rows import Scaling
from fisherfold.files import read_tensors, write_atomically, write_tensors
from fisherfold.inference.subspace import SubspacePrior
from fisherfold.problems.tasks import TaskStatistics

KIND, VERSION = "subspace", 1
_PRIOR = ("mean", "covariance", "noise")
Model = TypeVar("Model")


def save_model(path: str | os.PathLike[str], model: Any, *, with_statistics: bool) -> None:
    """Write a fitted multi-task estimator.

    Args:
        path: the folder; it is made if it does not exist.
        model: the estimator.
        with_statistics: keep the statistics of the rows.

    Raises:
        ValueError: if the path is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save into {folder}: it is a file, a folder is expected")
    scaling = model.scaling_
    tensors = {
        "frame": model._frame,
        "weights": model._weights,
        "scaling.center": torch.from_numpy(np.array(scaling.center)),
        "scaling.scale": torch.from_numpy(np.array(scaling.scale)),
    }
    if hasattr(model, "_spread"):
        tensors["spread"] = model._spread
    if hasattr(model, "_prior"):
        tensors |= {f"prior.{name}": getattr(model._prior, name) for name in _PRIOR}
    statistics = getattr(model, "statistics_", None)
    if with_statistics and statistics is not None:
        tensors |= {f"statistics.{f.name}": getattr(statistics, f.name) for f in dataclasses.fields(TaskStatistics)}
    header = _header(model, scaling)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", tensors, kind=KIND, version=VERSION, header=header)
    shown = {"kind": KIND, "version": VERSION, **header} | {"trace": f"{len(header['trace'])} rows"}
    write_atomically(folder / "model.json", json.dumps(shown, indent=1).encode())


def _header(model: Any, scaling: Scaling) -> dict[str, Any]:
    optional = ("ridge_", "ridge_errors_", "_outputs", "feature_names_in_", "classes_")
    return {
        "estimator": type(model).__name__,
        "fisherfold": __version__,
        "params": {name: _plain(value) for name, value in model.get_params().items()},
        "offset": scaling.offset,
        "intercept": scaling.intercept,
        "tasks": [_label(label) for label in model.task_ids_.tolist()],
        "n_features_in": int(model.n_features_in_),
        "n_iter": int(model.n_iter_),
        "trace": model.trace_,
        "fitted": {name: _plain(getattr(model, name)) for name in optional if hasattr(model, name)},
    }


def load_model(path: str | os.PathLike[str], cls: type[Model]) -> Model:
    """Read a fitted multi-task estimator.

    Args:
        path: the folder.
        cls: its class.

    Returns:
        The estimator.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if the folder holds another estimator.
    """
    if not Path(path).is_dir():
        raise FileNotFoundError(f"there is no model folder {path}")
    tensors, header = read_tensors(Path(path) / "model.safetensors", kind=KIND, version=VERSION)
    if header["estimator"] != cls.__name__:
        raise ValueError(f"{path} holds a {header['estimator']}, not a {cls.__name__}")
    model: Any = cls(**header["params"])
    model.scaling_ = Scaling(
        tensors["scaling.center"].numpy(), tensors["scaling.scale"].numpy(), header["offset"], header["intercept"]
    )
    model.n_features_in_, model.n_iter_, model.trace_ = header["n_features_in"], header["n_iter"], header["trace"]
    labels = np.empty(len(header["tasks"]), dtype=object)
    labels[:] = header["tasks"]
    numbers = all(isinstance(label, (int, float)) and not isinstance(label, bool) for label in header["tasks"])
    model._index = IdIndex(id_array(header["tasks"] if numbers else labels, "task"))
    for name, value in header["fitted"].items():
        setattr(model, name, _fitted(name, value))
    _restore(model, tensors)
    return cast("Model", model)


def _restore(model: Any, tensors: dict[str, Tensor]) -> None:
    model._frame = tensors["frame"]
    model._set_coefficients(tensors["weights"])
    if "prior.mean" in tensors:
        model._prior = SubspacePrior(frame=model._frame, **{name: tensors[f"prior.{name}"] for name in _PRIOR})
        model.prior_covariance_ = model._prior.covariance.numpy()
        model.noise_variance_ = model._prior.noise.numpy()
        model._spread = tensors["spread"]
    if "statistics.gram" in tensors:
        parts = {f.name: tensors[f"statistics.{f.name}"] for f in dataclasses.fields(TaskStatistics)}
        model.statistics_ = TaskStatistics(**parts)
    else:
        model.statistics_ = None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [plain(entry) for entry in value.tolist()]
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.random.RandomState):
        return None
    return plain(value)


def _label(label: Any) -> Any:
    if not isinstance(label, (str, int, float, bool)):
        raise TypeError(f"task ids can be saved if they are text or numbers, got {label!r} ({type(label).__name__})")
    return label


def _fitted(name: str, value: Any) -> Any:
    if name == "ridge_errors_":
        return {float(key): entry for key, entry in value.items()}
    return np.array(value) if isinstance(value, list) else value
