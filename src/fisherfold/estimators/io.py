"""Model files of the estimators: a folder with ``model.safetensors`` and, for people, ``model.json``.

The tensors and the parameters lie in one checked file (see ``fisherfold.files``), written under a temporary name and
renamed, so that an interrupted save leaves the old model or none. Ids that are text are kept as one UTF-8 block.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold._version import __version__
from fisherfold.estimators.completion_model import CompletionModel
from fisherfold.estimators.ids import IdIndex, Ids, plain
from fisherfold.files import read_tensors, write_atomically, write_tensors
from fisherfold.inference.completion import CompletionPosterior
from fisherfold.inference.sides import SetEffects, Side

KIND = "completion"
VERSION = 1
_SIDE_TENSORS = (
    "mean", "covariance", "weight", "shortfall", "counts", "precision", "center", "start_variance", "log_det"
)  # fmt: skip
_SET_TENSORS = ("effects", "sums", "shares")


def save_completion(
    path: str | os.PathLike[str], model: CompletionModel, estimator: str, params: dict[str, Any]
) -> None:
    """Write a model into a folder.

    Args:
        path: the folder; it is made if it does not exist.
        model: the model.
        estimator: the name of the estimator's class.
        params: the estimator's parameters.

    Raises:
        ValueError: if the path is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save into {folder}: it is a file, a folder is expected")
    tensors: dict[str, Tensor] = {}
    posterior = model.posterior
    header: dict[str, Any] = {
        "estimator": estimator, "fisherfold": __version__, "params": _plain_params(params),
        "inference": model.inference, "center": model.center, "scale": model.scale,
        "low": float(model.low), "high": float(model.high),
        "n_at_refresh": model.n_at_refresh, "n_merged": model.n_merged,
        "posterior": {
            "noise_precision": posterior.noise_precision, "weight_strength": posterior.weight_strength,
            "n_ratings": posterior.n_ratings, "fixed_ridge": posterior.fixed_ridge, "misfit": posterior.misfit,
            "converged": posterior.converged, "trace": posterior.trace,
        },
    }  # fmt: skip
    for name, side, ids in (
        ("rows", posterior.rows, model.row_ids), ("columns", posterior.columns, model.column_ids)
    ):  # fmt: skip
        tensors |= {f"{name}.{key}": getattr(side, key) for key in _SIDE_TENSORS}
        if side.set_effects is not None:
            tensors |= {f"{name}.set.{key}": getattr(side.set_effects, key) for key in _SET_TENSORS}
        kind, parts = _pack_ids(ids.labels, name)
        tensors |= {f"{name}.ids.{key}": part for key, part in parts.items()}
        header[name] = {"ids": kind, "count": len(ids), "has_offset": side.has_offset}
    tensors |= {"seen.offsets": model.seen_offsets, "seen.columns": model.seen_columns}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", tensors, kind=KIND, version=VERSION, header=header)
    summary = {"kind": KIND, "version": VERSION, **header}
    write_atomically(folder / "model.json", json.dumps(summary, indent=2).encode())


def load_completion(path: str | os.PathLike[str]) -> tuple[CompletionModel, dict[str, Any]]:
    """Read a model.

    Args:
        path: the folder.

    Returns:
        The model and the parameters of its estimator.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    if not Path(path).is_dir():
        raise FileNotFoundError(f"there is no model folder {path}")
    tensors, header = read_tensors(Path(path) / "model.safetensors", kind=KIND, version=VERSION)
    sides = [_side(tensors, name, header[name]["has_offset"]) for name in ("rows", "columns")]
    ids = [IdIndex(_unpack_ids(tensors, name, header[name]["ids"])) for name in ("rows", "columns")]
    model = CompletionModel(
        row_ids=ids[0], column_ids=ids[1], posterior=CompletionPosterior(sides[0], sides[1], **header["posterior"]),
        center=header["center"], scale=header["scale"], low=header["low"], high=header["high"],
        seen_offsets=tensors["seen.offsets"], seen_columns=tensors["seen.columns"], inference=header["inference"],
        n_at_refresh=header["n_at_refresh"], n_merged=header["n_merged"],
    )  # fmt: skip
    return model, header["params"]


def _side(tensors: dict[str, Tensor], name: str, has_offset: bool) -> Side:
    effects = None
    if f"{name}.set.effects" in tensors:
        effects = SetEffects(**{key: tensors[f"{name}.set.{key}"] for key in _SET_TENSORS})
    parts: dict[str, Any] = {key: tensors[f"{name}.{key}"] for key in _SIDE_TENSORS}
    return Side(**parts, has_offset=has_offset, set_effects=effects)


def _plain_params(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as JSON can hold them; a random generator is not kept."""
    out: dict[str, Any] = {}
    for name, value in params.items():
        value = plain(value)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if isinstance(value, tuple):
            value = list(value)
        out[name] = None if isinstance(value, np.random.RandomState) else value
    return out


def _pack_ids(labels: Ids, name: str) -> tuple[str, dict[str, Tensor]]:
    """The kind of the ids and the tensors that hold them."""
    if labels.dtype != object:
        return str(labels.dtype), {"numbers": torch.from_numpy(np.ascontiguousarray(labels))}
    texts = []
    for label in labels.tolist():
        if not isinstance(label, (str, int, float, bool)):
            raise TypeError(
                f"ids of {name} can be saved if they are text or numbers, got {label!r} ({type(label).__name__})"
            )
        texts.append(json.dumps(plain(label), ensure_ascii=False))
    blocks = [text.encode() for text in texts]
    ends = np.cumsum([len(block) for block in blocks])
    return "json", {"bytes": torch.from_numpy(np.frombuffer(b"".join(blocks), np.uint8).copy()),
                    "ends": torch.from_numpy(ends.astype(np.int64))}  # fmt: skip


def _unpack_ids(tensors: dict[str, Tensor], name: str, kind: str) -> Ids:
    if kind != "json":
        return tensors[f"{name}.ids.numbers"].numpy()
    block = tensors[f"{name}.ids.bytes"].numpy().tobytes()
    ends = [0, *tensors[f"{name}.ids.ends"].tolist()]
    labels = np.empty(len(ends) - 1, dtype=object)
    labels[:] = [json.loads(block[a:b]) for a, b in itertools.pairwise(ends)]
    return labels
