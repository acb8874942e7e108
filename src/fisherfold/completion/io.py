"""Model files of the estimators: a folder with ``model.safetensors`` and, for people, ``model.json``.

The tensors and the parameters lie in one checked file (see ``fisherfold.files``), written under a temporary name and
renamed, so that an interrupted save leaves the old model or none. Ids that are no numbers are one UTF-8 block.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from fisherfold._version import __version__
from fisherfold.completion.model import CompletionModel
from fisherfold.files import MODEL, model_folder, read_tensors, sound, write_atomically, write_tensors
from fisherfold.plain import counted
from fisherfold.tables.id_files import pack_ids, unpack_ids
from fisherfold.tables.ids import IdIndex
from fisherfold.tables.parameters import storable
from fisherfold.tables.posterior_files import finite_number, pack_posterior, take, unpack_posterior

KIND = "completion"
VERSION = 1
INFERENCES = ("variational", "point")


def save_completion(
    path: str | os.PathLike[str], model: CompletionModel, estimator: str, params: dict[str, Any],
    fitted: dict[str, Any],
) -> None:  # fmt: skip
    """Write a model into a folder.

    Args:
        path: the folder; it is made if it does not exist.
        model: the model.
        estimator: the name of the estimator's class.
        params: the estimator's parameters.
        fitted: what else it learnt.
    """
    tensors, numbers = pack_posterior(model.posterior)
    has_offset = numbers.pop("has_offset")
    header: dict[str, Any] = {
        "estimator": estimator, "fisherfold": __version__, "params": storable(params | {"checkpoint": None}),
        "inference": model.inference, "center": model.center, "scale": model.scale,
        "low": float(model.low), "high": float(model.high),
        "n_at_look": model.n_at_look, "n_at_start": model.n_at_start, "n_merged": model.n_merged,
        "posterior": numbers, "fitted": storable(fitted),
    }  # fmt: skip
    for k, (name, ids) in enumerate((("rows", model.row_ids), ("columns", model.column_ids))):
        kind, parts = pack_ids(ids.labels, name)
        tensors |= {f"{name}.ids.{key}": part for key, part in parts.items()}
        header[name] = {"ids": kind, "count": len(ids), "has_offset": has_offset[k]}
    tensors |= {f"seen.{name}": getattr(model, f"seen_{name}") for name in ("offsets", "columns", "values")}
    with model_folder(path, KIND) as folder:
        write_tensors(folder / MODEL, tensors, kind=KIND, version=VERSION, header=header)
        summary = {"kind": KIND, "version": VERSION, **header}
        write_atomically(folder / "model.json", json.dumps(summary, indent=2).encode())


def load_completion(path: str | os.PathLike[str]) -> tuple[CompletionModel, dict[str, Any], dict[str, Any]]:
    """Read a model.

    Args:
        path: the folder.

    Returns:
        The model, the parameters of its estimator and what else it learnt, not yet checked.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if the model is damaged or does not hold together.
    """
    if not Path(path).is_dir():
        raise FileNotFoundError(f"there is no model folder {path}")
    file = Path(path) / MODEL
    tensors, header = read_tensors(file, kind=KIND, version=VERSION)
    with sound(file, KIND):
        has_offset = [header[name]["has_offset"] for name in ("rows", "columns")]
        posterior = unpack_posterior(tensors, header["posterior"] | {"has_offset": has_offset})
        sizes = len(posterior.rows.mean), len(posterior.columns.mean)
        ids = [_index(tensors, name, header[name], n) for name, n in zip(("rows", "columns"), sizes, strict=True)]
        numbers = {name: finite_number(name, header[name]) for name in ("center", "scale", "low", "high")}
        counts = [int(finite_number(n, header[n], least=0)) for n in ("n_at_look", "n_at_start", "n_merged")]
        if header["inference"] not in INFERENCES or not isinstance(header["params"], dict):
            raise ValueError(f"inference is {header['inference']!r}, params {type(header['params']).__name__}")
        offsets, columns, values = _seen(tensors, *sizes)
        model = CompletionModel(
            row_ids=ids[0], column_ids=ids[1], posterior=posterior, seen_offsets=offsets, seen_columns=columns,
            seen_values=values, inference=header["inference"], n_at_look=counts[0], n_at_start=counts[1],
            n_merged=counts[2], **numbers,
        )  # fmt: skip
        fitted = header.get("fitted", {})
        if not isinstance(fitted, dict):
            raise ValueError(f"fitted is {type(fitted).__name__}")
    return model, header["params"], fitted


def _index(tensors: dict[str, Tensor], name: str, facts: dict[str, Any], n: int) -> IdIndex:
    labels = unpack_ids(tensors, name, facts["ids"])
    if len(labels) != n or facts["count"] != n:
        raise ValueError(f"{counted(len(labels), 'id')} for {n} {name}")
    return IdIndex.restore(labels)


def _seen(tensors: dict[str, Tensor], n_rows: int, n_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """What each row has rated: runs that follow each other, of columns that exist, and a value each."""
    offsets = take(tensors, "seen.offsets", (n_rows + 1,), whole=True).long()
    columns = take(tensors, "seen.columns", None, whole=True)
    runs = int(offsets[0]) == 0 and int(offsets[-1]) == len(columns) and bool((offsets.diff() >= 0).all())
    if not runs or (len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < n_columns):
        raise ValueError("seen.offsets and seen.columns do not fit the table")
    return offsets, columns.int(), take(tensors, "seen.values", (len(columns),))
