"""One model from shares of a table, one per process of ``torch.distributed``.

All processes agree on one numbering of the ids and cut the longer side into runs of about equally many ratings; every
entry is sent to the process that owns its member of that side. Entries that repeat a pair meet in the order of the
shares. Ratings live on ``device``: with the backend ``cpu:gloo,cuda:nccl`` sums over GPUs go by NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fisherfold.completion.entries import Codes, Entries, Floats, mixed
from fisherfold.completion.files import pack_posterior, unpack_posterior
from fisherfold.completion.inference.posterior import CompletionPosterior
from fisherfold.completion.model import CompletionModel
from fisherfold.completion.ratings import Ratings, TrainingRatings, Triplets
from fisherfold.completion.training import (
    PreparedRatings,
    Settings,
    model_of,
    solve,
    standardise,
    without_weights,
)
from fisherfold.distributed import Axis, Group, balanced_cuts, current_group
from fisherfold.files import digest, sound
from fisherfold.tables.agreement import check_same_file, check_same_options
from fisherfold.tables.checkpoint import FitCheckpoint
from fisherfold.tables.ids import IdIndex, objects
from fisherfold.tables.validation import saved_parameters
from fisherfold.threads import threads

if TYPE_CHECKING:
    from fisherfold.completion.rating_model import MatrixCompletion

# Up to so many ratings the model keeps them, 8 bytes each, on every process.
SEEN_LIMIT = 2**26


def fit_shared(
    model: MatrixCompletion,
    read: Callable[[Group], Entries | None],
    process_group: Any,
    checkpoint: str | os.PathLike[str] | None,
    file: str | Path | None = None,
) -> MatrixCompletion:
    """Fit an estimator together with the other processes of a group."""
    group = current_group(process_group)
    entries: Entries | None = None
    with group.together():
        settings = model._settings()
        if settings.likelihood != "gaussian":
            raise ValueError(
                f"likelihood={settings.likelihood!r} needs a fit in one process, like features, time and weights: call "
                "fit, or use likelihood='gaussian'"
            )
        if checkpoint is not None and settings.inference == "point":
            raise ValueError("checkpoint needs inference='variational'")
    # the path of a checkpoint may differ, and the seed, of which that of the first process counts
    common = saved_parameters(
        {name: value for name, value in model.get_params().items() if name != "random_state"}
    )
    check_same_options(common | {"checkpoint": None if checkpoint is None else "a file"}, group)
    if file is not None:
        check_same_file(file, group)
    with group.together():
        entries = read(group)
    settings = replace(settings, seed=group.gather_objects(settings.seed)[0])
    names = group.gather_objects(None if entries is None else (entries.names, entries.frame))
    with threads(model.n_jobs):
        found = _fit(entries, settings, group, checkpoint)
    if named := next(filter(None, names), None):
        model._set_names(Entries([], [], np.zeros(0), *named))
    model._adopt(found)
    return model


def _fit(
    entries: Entries | None,
    settings: Settings,
    group: Group,
    checkpoint: str | os.PathLike[str] | None,
) -> CompletionModel:
    table, row_ids, column_ids, data = share_out(
        entries, settings, group, with_digest=checkpoint is not None
    )
    settings = settings.for_table(len(row_ids), len(column_ids))
    saved, init = None, None
    if checkpoint is not None:
        saved = FitCheckpoint(checkpoint, _identity(data, settings), group)
        if (found := saved.load()) is not None:
            with sound(saved.path, "checkpoint"):
                init = unpack_posterior(*found).shared_out(
                    table.ratings.row_axis, table.ratings.column_axis
                )

    def after_pass(posterior: CompletionPosterior) -> None:
        if saved is not None:
            arrays, meta = pack_posterior(posterior.gathered())
            saved.save({name: torch.from_numpy(array) for name, array in arrays.items()}, meta)

    posterior = solve(table, settings, init, after_pass).gathered()
    return model_of(
        (row_ids, column_ids),
        table,
        posterior,
        settings.inference,
        _seen(table, len(row_ids), group),
    )


def _identity(data: str, settings: Settings) -> dict[str, Any]:
    """What tells this fit from others; ``max_iter`` may grow."""
    free = {"max_iter", "device", "verbose"}
    options = {name: value for name, value in asdict(settings).items() if name not in free}
    return options | {"data": data}


def _digest(ids: tuple[IdIndex, IdIndex], entries: Triplets, flipped: bool, group: Group) -> str:
    """A fingerprint of ids and entries that does not depend on who holds which."""
    own, other = entries.rows, entries.columns
    if not flipped:
        own, other = other, own
    pair = (own.astype(np.uint64) << np.uint64(32)) + other.astype(np.uint64)
    total = int(mixed(mixed(pair) ^ entries.values.view(np.uint64)).sum())
    parts = torch.tensor([total >> 32, total % 2**32, len(entries)])
    high, low, count = group.sum(parts).tolist()
    arrays = [torch.from_numpy(part.copy()) for index in ids for part in index.to_arrays().values()]
    return f"{count} entries {((high << 32) + low) % 2**64:016x} of ids {digest(arrays)}"


def share_out(
    entries: Entries | None, settings: Settings, group: Group, *, with_digest: bool = False
) -> tuple[PreparedRatings, IdIndex, IdIndex, str]:
    """Number the ids of all shares, give every process its ratings, centred and scaled, and take a digest of all."""
    with group.together():
        local = (
            (IdIndex(), IdIndex(), *np.zeros((2, 0), dtype=np.int64))
            if entries is None
            else entries.indexed()
        )
    values = np.zeros(0) if entries is None else entries.values
    ids = _joint_index(local[0], group), _joint_index(local[1], group)
    codes = [
        index.encode(part.labels)[code]
        for index, part, code in zip(ids, local[:2], local[2:], strict=True)
    ]
    flipped = len(ids[0]) > len(ids[1])
    own, other = codes if flipped else codes[::-1]
    counts = np.bincount(own, minlength=len(ids[0 if flipped else 1]))
    cuts = balanced_cuts(group.sum(torch.from_numpy(counts)).numpy(), group.size)
    own, other, values = _exchanged(own, other, values, cuts, group)
    rows, columns = (own, other) if flipped else (other, own)
    given = Triplets(rows, columns, values)
    with group.together():
        mine = given.merged(settings.rule, ids)
    merged = int(group.sum(torch.tensor(len(given) - len(mine))))
    # all processes have weights, or none: they join their sums of the same tables
    if bool(group.largest(torch.tensor(int(mine.amounts is not None)))) and mine.amounts is None:
        mine = replace(mine, amounts=np.ones(len(mine)))
    data = _digest(ids, mine, flipped, group) if with_digest else ""
    observed = given.values if settings.rule == "mean" else mine.values
    ends = float(observed.min(initial=np.inf)), float(observed.max(initial=-np.inf))
    numbers = without_weights(mine) if settings.inference == "point" else mine
    unit = standardise(numbers, ends, settings, group)
    start = cuts[group.rank]
    axis = Axis(len(counts), start, cuts[group.rank + 1], group)
    across = Axis.whole(len(ids[1] if flipped else ids[0]))
    if flipped:
        axes = axis, across
        shard = replace(numbers, rows=mine.rows - start)
    else:
        axes = across, axis
        shard = replace(numbers, columns=mine.columns - start)
    ratings = Ratings.over(
        axes,
        shard,
        center=unit.center,
        scale=unit.scale,
        dtype=unit.dtype,
        device=settings.device,
    )
    return PreparedRatings(ratings, mine, unit, merged), *ids, data


def _joint_index(index: IdIndex, group: Group) -> IdIndex:
    """The ids of all processes under one numbering, as of one process that reads the shares one after the other."""
    if not bool(group.largest(torch.tensor(int(index.is_text)))):
        return IdIndex(group.gather(torch.from_numpy(index.labels)).numpy())
    return IdIndex(
        objects(
            [
                str(label)
                for labels in group.gather_objects(index.labels)
                for label in labels.tolist()
            ]
        )
    )


def _exchanged(
    own: Codes, other: Codes, values: Floats, cuts: list[int], group: Group
) -> tuple[Codes, Codes, Floats]:
    """The entries of the members that this process owns, from all processes, in the order of the ranks."""
    owner = np.searchsorted(np.asarray(cuts[1:-1]), own, side="right")
    order = np.argsort(owner, kind="stable")
    packed = np.empty((len(own), 4), dtype=np.int32)
    packed[:, 0], packed[:, 1] = own[order], other[order]
    packed[:, 2:] = values[order].view(np.int32).reshape(-1, 2)
    sent = np.bincount(owner, minlength=group.size).tolist()
    found = torch.cat(group.exchange(torch.from_numpy(packed), sent)).numpy()
    values = np.ascontiguousarray(found[:, 2:]).view(np.float64).reshape(-1)
    return found[:, 0].astype(np.int64), found[:, 1].astype(np.int64), values


def _seen(table: PreparedRatings, n_rows: int, group: Group) -> TrainingRatings | None:
    """The ratings of all processes, on each of them, unless they are too many."""
    entries = table.entries
    if group.size > 1:
        if table.ratings.n_ratings > SEEN_LIMIT:
            return None
        replicated = bool(group.largest(torch.tensor(int(entries.amounts is not None))))
        found = {}
        for name in ("rows", "columns", "values", *(("amounts", "spread") if replicated else ())):
            given = getattr(entries, name)
            given = entries._default(name) if given is None else given
            found[name] = group.gather(torch.from_numpy(np.ascontiguousarray(given))).numpy()
        entries = Triplets(**found).merged("keep")
    return TrainingRatings.of(entries, n_rows)
