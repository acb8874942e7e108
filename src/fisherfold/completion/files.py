"""A completed matrix as named arrays and plain numbers, for model folders, pickles and checkpoints.

What is read is checked once, here: shapes belong together, numbers are finite, those that must be positive are, and
no prediction can overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.events import Events
from fisherfold.completion.inference.features import FeatureEncoder
from fisherfold.completion.inference.likelihoods import Ordinal
from fisherfold.completion.inference.posterior import CompletionPosterior, Side
from fisherfold.completion.inference.prior_mean import FeatureEffects, SetEffects
from fisherfold.completion.inference.time_effects import TimeEffects
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import TrainingRatings
from fisherfold.tables.folders import expect, expect_number, pack_index, unpack_index

KIND = "completion"
VERSION = 2  # 2: amounts of members
INFERENCES = ("variational", "point", "implicit")
Arrays = dict[str, npt.NDArray[Any]]
_SIDES = ("rows", "columns")
_COUNTS = ("n_merged", "n_at_start", "n_since_start", "n_since_refined")
# Shapes: n members, m of the other side, q coefficients and t pairs of them, p columns of features, k effects of time
# in s periods, and one number (o); marked + where positive, 0 where not negative, # where whole and not negative.
_SIDE = {
    "mean": "nq",
    "covariance": "nt",
    "weight": "n+",
    "weighted_sse": "n0",
    "counts": "n0",
    "amounts": "n0",
    "precision": "qq",
    "center": "q",
    "start_variance": "q+",
    "log_det": "n",
}
_SET = {"effects": "mq", "sums": "nq", "shares": "m"}
_FEATURES = {"table": "np", "groups": "p#", "weights": "pq", "strength": "p", "inverse": "pp"}
_TIME = {"starts": "s", "keys": "k#", "mean": "k", "variance": "k0", "prior": "o+"}
_OF_RATINGS = {
    "amounts": 0.0,
    "weights": 0.0,
    "spread": 0.0,
    "times": None,
    "excess": None,
}  # least values
_LARGEST = 1e30  # of precisions and their like: beyond, their products leave float64


def pack(model: CompletionModel, *, slim: bool = False) -> tuple[Arrays, dict[str, Any]]:
    """Take a model apart; a slim one is for serving.

    It is without ratings, and without covariances of rows where no prediction depends on them: the
    expected value of a category does, and so does what features tell of a member without ratings.
    """
    arrays, meta = pack_posterior(model.posterior)
    needed = model.categories is not None or model.posterior.rows.features is not None
    meta["has_spread"] = model.has_spread and (needed or not slim)
    if not meta["has_spread"]:
        del arrays["rows.covariance"]
    if slim:
        model = replace(model, seen=None, events=None)
    meta |= {name: float(getattr(model, name)) for name in ("center", "scale", "low", "high")}
    meta |= {name: int(getattr(model, name)) for name in _COUNTS} | {"inference": model.inference}
    meta["unobserved_weight"] = model.unobserved_weight
    meta["encoders"] = [None if each is None else each.to_json() for each in model.encoders]
    arrays |= pack_index(model.row_ids, "rows") | pack_index(model.column_ids, "columns")
    if model.categories is not None:
        arrays["categories"] = model.categories
    if model.events is not None:
        arrays |= {"events.keys": model.events.keys, "events.values": model.events.values}
    if model.seen is not None:
        parts = vars(model.seen).items()
        arrays |= {f"seen.{name}": part for name, part in parts if part is not None}
    return arrays, meta


def unpack(
    arrays: Mapping[str, Any], meta: Mapping[str, Any], device: str = "cpu"
) -> CompletionModel:
    """Put a model together again."""
    if "rows.amounts" not in arrays:
        raise ValueError("it was written by version 0.2, whose models cannot be read: fit it again")
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    has_spread = meta.get("has_spread", True)
    if not isinstance(has_spread, bool) or has_spread != ("rows.covariance" in tensors):
        raise ValueError(f"has_spread is {has_spread!r}, which its rows.covariance does not fit")
    if not has_spread:
        n, q = expect(tensors, "rows.mean", (None, None)).shape
        tensors["rows.covariance"] = torch.zeros(n, q * (q + 1) // 2)
    posterior = unpack_posterior(tensors, meta, device)
    n, m = len(posterior.rows.mean), len(posterior.columns.mean)
    if not bool(posterior.rows.counts.any() & posterior.columns.counts.any()):
        raise ValueError("none of its rows or of its columns has ratings")
    if meta.get("inference") not in INFERENCES:
        raise ValueError(
            f"inference is {meta.get('inference')!r}, one of {', '.join(INFERENCES)} is expected"
        )
    model = CompletionModel(
        unpack_index(tensors, "rows", n),
        unpack_index(tensors, "columns", m),
        posterior,
        expect_number(meta, "center"),
        expect_number(meta, "scale", least=1e-300),
        expect_number(meta, "low"),
        expect_number(meta, "high"),
        _seen(tensors, n, m),
        meta["inference"],
        **{name: expect_number(meta, name, least=0, integer=True) for name in _COUNTS},
        unobserved_weight=expect_number(
            {"unobserved_weight": 0.0} | dict(meta), "unobserved_weight", least=0
        ),
        categories=_categories(tensors, posterior),
        events=_events(tensors),
        encoders=_encoders(meta, posterior),
        has_spread=has_spread,
    )
    _check_predictions(model)
    return model


def _check_predictions(model: CompletionModel) -> None:
    """Bound the moments of every prediction by the largest parts: each part is finite, their products may not be."""
    posterior, means, spreads, doubts = model.posterior, [], [], []
    for side in (posterior.rows, posterior.columns):
        unknown = side.unknown_member()
        means.append(_largest(side.mean, side.center, unknown.mean))
        spreads.append(means[-1] ** 2 + _largest(side.covariance, unknown.covariance))
        doubts.append(posterior.weight_strength + _largest(side.weighted_sse))
    drift = sum(
        _largest(effect.mean, effect.variance) + effect.prior
        for effect in posterior.time_effects
        if effect
    )
    q = model.posterior.rows.mean.shape[1]
    mean = q * math.prod(means) + sum(means) + drift
    variance = (q + 1) ** 2 * math.prod(1 + spread for spread in spreads) + drift
    std = math.sqrt(variance + math.prod(doubts) / posterior.noise_precision)
    most = float(torch.finfo(posterior.rows.mean.dtype).max)
    if not (mean < most and max(mean, std) * model.scale < 1e304):
        raise ValueError("its numbers are so large that predictions overflow")


def _largest(*tensors: Tensor) -> float:
    return max(
        (float(torch.linalg.vector_norm(t, math.inf)) for t in tensors if t.numel()), default=0.0
    )


def _categories(tensors: Mapping[str, Tensor], posterior: CompletionPosterior) -> Any:
    """The values of ordered categories, as many as the posterior has."""
    if posterior.ordinal is None:
        return None
    found = expect(tensors, "categories", (len(posterior.ordinal.values),)).double().numpy()
    if not (np.diff(found) > 0).all():
        raise ValueError("categories must ascend")
    return found


def _events(tensors: Mapping[str, Tensor]) -> Events | None:
    if "events.keys" not in tensors:
        return None
    keys = expect(tensors, "events.keys", (None,), integers=True).long().numpy()
    values = expect(tensors, "events.values", (len(keys),)).double().numpy()
    if not (np.diff(keys) > 0).all():
        raise ValueError("events.keys must ascend")
    return Events(keys, values)


def _encoders(meta: Mapping[str, Any], posterior: CompletionPosterior) -> Any:
    """How features are encoded, into as many columns as the posterior has effects."""
    given = meta.get("encoders")
    if not isinstance(given, list) or len(given) != 2:
        raise ValueError("its encoders are not those of rows and columns")
    found = [None if each is None else FeatureEncoder.from_json(each) for each in given]
    for encoder, side in zip(found, (posterior.rows, posterior.columns), strict=True):
        width = 0 if side.features is None else side.features.table.shape[1]
        if (0 if encoder is None else encoder.width) != width:
            raise ValueError("its encoders do not fit the effects of features")
    return found[0], found[1]


def _seen(tensors: Mapping[str, Tensor], n_rows: int, n_columns: int) -> TrainingRatings | None:
    """What each row has rated: runs that follow each other, of columns that exist, and a value each."""
    if "seen.offsets" not in tensors:
        return None
    offsets = expect(tensors, "seen.offsets", (n_rows + 1,), integers=True).long().numpy()
    columns = expect(tensors, "seen.columns", (None,), integers=True, least=0).int().numpy()
    values = expect(tensors, "seen.values", (len(columns),)).numpy()
    runs = offsets[0] == 0 and offsets[-1] == len(columns) and (np.diff(offsets) >= 0).all()
    if not runs or columns.max(initial=-1) >= n_columns:
        raise ValueError("seen.offsets and seen.columns do not fit the table")
    others = {}
    for name, least in _OF_RATINGS.items():
        if f"seen.{name}" in tensors:
            found = expect(tensors, f"seen.{name}", (len(columns),), least=least)
            others[name] = found.double().numpy()
    return TrainingRatings(offsets, columns, values, **others)


def pack_posterior(posterior: CompletionPosterior) -> tuple[Arrays, dict[str, Any]]:
    """Take a posterior apart."""
    tensors: dict[str, Any] = {}
    for name, side, drift in zip(
        _SIDES, (posterior.rows, posterior.columns), posterior.time_effects, strict=True
    ):
        tensors |= {f"{name}.{key}": getattr(side, key) for key in _SIDE}
        for part, held in (("set", side.set_effects), ("features", side.features), ("time", drift)):
            tensors |= (
                {f"{name}.{part}.{key}": value for key, value in vars(held).items()} if held else {}
            )
        if drift is not None:
            tensors[f"{name}.time.prior"] = torch.tensor([drift.prior], dtype=torch.float64)
    if posterior.ordinal is not None:
        tensors |= {f"ordinal.{key}": value for key, value in vars(posterior.ordinal).items()}
    names = (
        "noise_precision",
        "weight_strength",
        "weighted_sse",
        "n_ratings",
        "amount",
        "fixed_ridge",
        "converged",
        "trace",
        "extra_bound",
    )
    meta: dict[str, Any] = {name: getattr(posterior, name) for name in names}
    meta["has_offset"] = [posterior.rows.has_offset, posterior.columns.has_offset]
    return {
        name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()
    }, meta


def unpack_posterior(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: str = "cpu"
) -> CompletionPosterior:
    """Put a posterior together again."""
    sizes = [len(expect(tensors, f"{name}.counts", (None,), least=0)) for name in _SIDES]
    q = expect(tensors, "rows.mean", (None, None)).shape[1]
    offsets, trace = meta.get("has_offset"), meta.get("trace")
    if not (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(isinstance(value, bool) for value in offsets)
    ):
        raise ValueError(f"has_offset is {offsets!r}, two truth values are expected")
    if not isinstance(trace, list) or not all(isinstance(row, dict) for row in trace):
        raise ValueError("its trace is not a table of numbers")
    strength = expect_number(meta, "weight_strength", least=0, most=_LARGEST)
    if 0 < strength <= 2:
        raise ValueError(f"weight_strength is {strength:g}, 0 or more than 2 is expected")
    ridge = meta.get("fixed_ridge")
    rows, columns = (_side(tensors, k, sizes, q, offsets[k], device) for k in (0, 1))
    return CompletionPosterior(
        rows,
        columns,
        noise_precision=expect_number(meta, "noise_precision", least=1 / _LARGEST, most=_LARGEST),
        weight_strength=strength,
        n_ratings=expect_number(meta, "n_ratings", least=1, integer=True),
        amount=expect_number(meta, "amount", least=0, most=_LARGEST),
        fixed_ridge=None
        if ridge is None
        else expect_number(meta, "fixed_ridge", least=0, most=_LARGEST),
        weighted_sse=expect_number(meta, "weighted_sse", least=0),
        converged=bool(meta.get("converged")),
        ordinal=_ordinal(tensors, device),
        time_effects=(_time(tensors, "rows.time", device), _time(tensors, "columns.time", device)),
        extra_bound=expect_number(meta, "extra_bound") if "extra_bound" in meta else 0.0,
        trace=[{str(name): float(value) for name, value in row.items()} for row in trace],
    )


def _take(
    tensors: Mapping[str, Tensor],
    prefix: str,
    shapes: dict[str, str],
    sizes: dict[str, int],
    device: str,
) -> dict[str, Any]:
    """Tensors by name; what is not a letter of a size is a mark of ``_SIDE``."""
    return {
        name: expect(
            tensors,
            f"{prefix}.{name}",
            tuple(sizes[letter] for letter in shape if letter.isalpha()),
            positive="+" in shape,
            least=0 if {"0", "#"} & set(shape) else None,
            integers="#" in shape,
        ).to(device)
        for name, shape in shapes.items()
    }


def _side(
    tensors: Mapping[str, Tensor], k: int, counts: list[int], q: int, has_offset: bool, device: str
) -> Side:
    name = _SIDES[k]
    sizes = {"n": counts[k], "m": counts[1 - k], "q": q, "t": q * (q + 1) // 2}
    parts = _take(tensors, name, _SIDE, sizes, device)
    scales = torch.linalg.eigvalsh(parts["precision"])
    if not 1 / _LARGEST < float(scales.min()) <= float(scales.max()) < _LARGEST:
        raise ValueError(f"{name}.precision must be positive definite")
    if f"{name}.set.effects" in tensors:
        parts["set_effects"] = SetEffects(**_take(tensors, f"{name}.set", _SET, sizes, device))
    if f"{name}.features.table" in tensors:
        sizes["p"] = expect(tensors, f"{name}.features.table", (sizes["n"], None)).shape[1]
        parts["features"] = FeatureEffects(
            **_take(tensors, f"{name}.features", _FEATURES, sizes, device)
        )
    return Side(**parts, has_offset=has_offset)


def _time(tensors: Mapping[str, Tensor], name: str, device: str) -> TimeEffects | None:
    """The effects of time of one side, if there are any."""
    if f"{name}.keys" not in tensors:
        return None
    keys, starts = (
        expect(tensors, f"{name}.keys", (None,), integers=True),
        expect(tensors, f"{name}.starts", (None,)),
    )
    sizes = {"k": len(keys), "s": len(starts), "o": 1}
    found = _take(tensors, name, _TIME, sizes, device)
    if not sizes["k"] or not bool((found["keys"].diff() > 0).all()):
        raise ValueError(f"{name}.keys must ascend")
    return TimeEffects(
        **found | {"prior": float(found["prior"]), "starts": found["starts"].double()}
    )


def _ordinal(tensors: Mapping[str, Tensor], device: str) -> Ordinal | None:
    """The categories, if there are any."""
    if "ordinal.values" not in tensors:
        return None
    values = expect(tensors, "ordinal.values", (None,))
    cuts = expect(tensors, "ordinal.cuts", (len(values) - 1,))
    if len(values) < 2 or not bool((values.diff() > 0).all() & (cuts.diff() > 0).all()):
        raise ValueError("ordinal.values and ordinal.cuts must ascend")
    return Ordinal(cuts.to(device), values.to(device))
