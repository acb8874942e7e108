"""From shares of a table, one per process, to ratings that are shared out by their longer side.

First pass: distinct ids with their counts, and the mean, spread and range of the values. Then all processes agree on
one numbering and cut the longer side into runs of about equally many ratings. Second pass: every entry is sent to the
process that owns its member of that side, and sorted there as it arrives. Nobody holds more of the table than a batch
of its own share and the ratings it owns; entries that repeat a pair meet in the order of the shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fisherfold.completion.extremes import resolving, sampled
from fisherfold.completion.ratings import Chunk, Ratings, RepeatedPairs
from fisherfold.distributed import Axis, Group, balanced_cuts
from fisherfold.tables.ids import IdIndex, Ids, plain
from fisherfold.tables.inputs import Observations
from fisherfold.tables.shared_ids import cast, joint_index

BATCH = 2**19
# Up to so many ratings a model that was fitted over several processes keeps them, 8 bytes each, on every process.
SEEN_LIMIT = 2**26
# Of the values of a share so many tell where most of them lie.
_SAMPLE = 2**13
_ODD = [np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]


class NoRatings(ValueError):
    """All shares together hold no rating."""


@dataclass
class Batch:
    """Some entries of a share.

    Attributes:
        rows: row ids.
        columns: column ids.
        values: values in float64, finite.
    """

    rows: Ids
    columns: Ids
    values: npt.NDArray[np.float64]


@dataclass
class Share:
    """The part of a table that one process reads.

    Attributes:
        batches: called to go through the entries, a bounded number at a time; called twice.
        row_names: row ids that belong to the table whether they have an entry or not.
        column_names: the same for columns.
    """

    batches: Callable[[], Iterator[Batch]]
    row_names: Ids | None = None
    column_names: Ids | None = None

    @classmethod
    def of(cls, found: Observations) -> Share:
        """A share that is in memory.

        Args:
            found: the entries.

        Returns:
            The share.
        """

        def batches() -> Iterator[Batch]:
            for start in range(0, len(found.values), BATCH):
                part = slice(start, start + BATCH)
                yield Batch(found.rows[part], found.columns[part], found.values[part])

        return cls(batches, found.all_rows, found.all_columns)


@dataclass
class Prepared:
    """Entries as the solvers want them.

    Attributes:
        ratings: numbered, centred and scaled; over several processes the longer side is shared out.
        row_ids: the names of the rows.
        column_ids: the names of the columns.
        center: what was subtracted.
        scale: what was divided by.
        low: the smallest value.
        high: the largest value.
        n_merged: how many entries were merged into another one.
        given: over several processes, a sum of hashes of the entries as they were given; else empty.
    """

    ratings: Ratings
    row_ids: IdIndex
    column_ids: IdIndex
    center: float
    scale: float
    low: float
    high: float
    n_merged: int
    given: str = ""


@dataclass
class _Side:
    """Distinct ids of one side of a share, and how many entries each has."""

    index: IdIndex | None = None
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, ids: Ids, *, entries: bool = True) -> None:
        if self.index is None:
            self.index = IdIndex(ids)
        else:
            if (ids.dtype == object) != (self.index.labels.dtype == object):
                # a later batch has names where the first had numbers
                self.index = IdIndex(cast(self.index.labels, "object"))
                ids = cast(ids, "object")
            self.index.add(ids)
        grown = np.zeros(len(self.index), dtype=np.int64)
        grown[: len(self.counts)] = self.counts
        if entries:
            grown += np.bincount(self.index.numbers(ids), minlength=len(grown))
        self.counts = grown

    @property
    def labels(self) -> Ids:
        return np.zeros(0, dtype=np.int64) if self.index is None else self.index.labels


@dataclass
class _Values:
    """Count, mean, squares about it, range and some of the values of a share."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = np.inf
    high: float = -np.inf
    sample: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, count: int, mean: float, squares: float) -> None:
        """Join with what is known about other values (Chan, Golub and LeVeque)."""
        if count:
            off, joint = mean - self.mean, self.count + count
            self.squares += squares + off * off * self.count * count / joint
            self.mean += off * count / joint
            self.count = joint


@dataclass
class _Entries:
    """Σ hash(row, column, value) over entries, modulo 2⁶⁴: the same bits however they are shared out and ordered."""

    total: int = 0

    def add(self, rows: Ids, columns: Ids, values: npt.NDArray[np.float64]) -> None:
        key = values.view(np.uint64) ^ (rows.astype(np.uint64) * _ODD[0] + columns.astype(np.uint64) * _ODD[1])
        for shift, factor in zip((30, 27), _ODD[2:], strict=True):  # splitmix64
            key = (key ^ (key >> np.uint64(shift))) * factor
        self.total += int((key ^ (key >> np.uint64(31))).view(np.int64).sum())

    def joint(self, group: Group) -> str:
        """The sum over all processes."""
        return f"{sum(map(int, group.gather_texts(str(self.total)))) % 2**64:x}"


def share_out(share: Share, group: Group, *, dtype: torch.dtype, duplicates: str, centred: bool) -> Prepared:
    """Number the ids of all shares, centre and scale the values, and give every process its ratings.

    Args:
        share: what this process has read.
        group: the processes.
        dtype: of the ratings.
        duplicates: the rule for pairs that occur twice.
        centred: whether the mean of all values is subtracted.

    Returns:
        The table.

    Raises:
        NoRatings: if there are no ratings at all.
    """
    rows, columns, values = _first_pass(share, group)
    everything = _joint(values, group)
    if everything.count == 0:
        raise NoRatings("there are no ratings: found 0 observed entries on all ranks, at least 1 is needed")
    # sums and replacements are made before the centre is taken off, as by ``joined``
    later = duplicates in ("sum", "last")
    center = everything.mean if centred and not later else 0.0
    scale = 1.0 if later else _scale(everything, center)
    if not later:
        dtype = resolving(everything.sample, everything.low, everything.high, scale, dtype)
    ids = joint_index(rows.labels, group, "row"), joint_index(columns.labels, group, "column")
    flipped = len(ids[0]) > len(ids[1])
    side, index = (rows, ids[0]) if flipped else (columns, ids[1])
    counts = np.zeros(len(index), dtype=np.int64)
    counts[index.numbers(cast(side.labels, str(index.labels.dtype)))] = side.counts
    cuts = balanced_cuts(group.sum(torch.from_numpy(counts)).numpy(), group.size)
    axis = Axis(len(index), cuts[group.rank], cuts[group.rank + 1], group)
    other = Axis.whole(len(ids[1] if flipped else ids[0]))

    given = _Entries()

    def chunks() -> Iterator[Chunk]:
        return _arrivals(share, group, ids, flipped, cuts, center, scale, kind, given)

    def named(found: RepeatedPairs) -> RepeatedPairs:
        pair = (found.column + axis.start, found.row) if flipped else (found.row, found.column + axis.start)
        return RepeatedPairs(found.count, *(plain(ids[k].labels[number]) for k, number in enumerate(pair)))

    kind = torch.float64 if later else dtype
    ratings = Ratings.from_chunks(
        chunks(), (other, axis), dtype=kind, duplicates=duplicates, named=named,  # type: ignore[arg-type]
    )  # fmt: skip
    merged = ratings.n_duplicates
    if later:
        ratings, everything = _rescaled(ratings, dtype, centred)
        center = everything.mean if centred else 0.0
        scale = _scale(everything, center)
    ratings = ratings.T if flipped else ratings
    return Prepared(ratings, *ids, center, scale, everything.low, everything.high, merged, given.joint(group))


def _rescaled(ratings: Ratings, dtype: torch.dtype, centred: bool) -> tuple[Ratings, _Values]:
    """Centre and scale ratings that were merged as they stand."""
    rows, columns, raw = ratings.entries()
    found = _Values(low=float(raw.min()) if len(raw) else np.inf, high=float(raw.max()) if len(raw) else -np.inf)
    mean = float(raw.mean()) if len(raw) else 0.0
    found.add(len(raw), mean, float((raw - mean).square().sum()))
    found.sample = sampled(raw.numpy(), _SAMPLE)[:_SAMPLE]
    found = _joint(found, ratings.group)
    center = found.mean if centred else 0.0
    dtype = resolving(found.sample, found.low, found.high, _scale(found, center), dtype)
    values = ((raw - center) / _scale(found, center)).to(dtype)
    pieces = [Chunk(rows.numpy(), columns.numpy(), values.numpy())]
    return Ratings.from_chunks(pieces, (ratings.row_axis, ratings.column_axis), dtype=dtype), found


def _first_pass(share: Share, group: Group) -> tuple[_Side, _Side, _Values]:
    rows, columns, values = _Side(), _Side(), _Values()
    with group.together():
        for batch in share.batches():
            rows.add(batch.rows)
            columns.add(batch.columns)
            mean = float(batch.values.mean()) if len(batch.values) else 0.0
            values.add(len(batch.values), mean, float(np.square(batch.values - mean).sum()))
            if len(values.sample) < _SAMPLE:
                values.sample = np.append(values.sample, sampled(batch.values, _SAMPLE))[:_SAMPLE]
            values.low = min(values.low, float(batch.values.min(initial=np.inf)))
            values.high = max(values.high, float(batch.values.max(initial=-np.inf)))
        for side, names in ((rows, share.row_names), (columns, share.column_names)):
            if names is not None and len(names):
                side.add(names, entries=False)
    return rows, columns, values


def _joint(values: _Values, group: Group) -> _Values:
    """The same over all processes, joined in the order of the ranks."""
    known = torch.tensor([values.count, values.mean, values.squares, values.low, values.high], dtype=torch.float64)
    joint = _Values()
    for count, mean, squares, low, high in group.gather(known[None]).tolist():
        joint.add(int(count), mean, squares)
        joint.low, joint.high = min(joint.low, low), max(joint.high, high)
    padded = np.append(values.sample, np.full(_SAMPLE - len(values.sample), np.nan))
    samples = group.gather(torch.from_numpy(padded)[None]).flatten()
    joint.sample = samples[~samples.isnan()].numpy()
    return joint


def _scale(values: _Values, center: float) -> float:
    """The standard deviation about the centre; the size of constant values, which have no spread."""
    largest = max(abs(values.low - center), abs(values.high - center))
    if not largest > 1e-12 * abs(center):
        return abs(center) or 1.0
    return math.sqrt(values.squares / values.count + (values.mean - center) ** 2)


def _arrivals(
    share: Share, group: Group, ids: tuple[IdIndex, IdIndex], flipped: bool, cuts: list[int], center: float,
    scale: float, dtype: torch.dtype, given: _Entries,
) -> Iterator[Chunk]:  # fmt: skip
    """The entries that this process owns, as the others send them; rounds go on until everybody has sent everything."""
    kinds = [str(index.labels.dtype) for index in ids]
    kind = np.float32 if dtype == torch.float32 else np.float64
    width = 1 if dtype == torch.float32 else 2
    for batch in _rounds(share, group):
        numbers = [ids[k].numbers(cast(part, kinds[k])) for k, part in enumerate((batch.rows, batch.columns))]
        given.add(numbers[0], numbers[1], batch.values)
        other, own = (numbers[1], numbers[0]) if flipped else (numbers[0], numbers[1])
        owner = np.searchsorted(np.asarray(cuts[1:-1]), own, side="right")
        order = np.argsort(owner, kind="stable")
        packed = np.empty((len(own), 2 + width), dtype=np.int32)
        packed[:, 0], packed[:, 1] = other[order], own[order]
        packed[:, 2:] = ((batch.values - center) / scale).astype(kind)[order].view(np.int32).reshape(-1, width)
        sent = np.bincount(owner, minlength=group.size).tolist()
        for source, piece in enumerate(group.exchange(torch.from_numpy(packed), sent)):
            found = piece.numpy()
            values = np.ascontiguousarray(found[:, 2:]).view(kind).reshape(-1)
            yield Chunk(found[:, 0], found[:, 1] - np.int32(cuts[group.rank]), values, source)


def _rounds(share: Share, group: Group) -> Iterator[Batch]:
    """The batches of this share, then empty ones until the longest share is through."""
    nothing = np.zeros(0, dtype=np.int64)
    batches = share.batches()
    while True:
        with group.together():
            batch = next(batches, None)
        if not bool(group.largest(torch.tensor(int(batch is not None)))):
            return
        yield Batch(nothing, nothing, np.zeros(0)) if batch is None else batch


def joint_counts(counts: dict[str, int], group: Group) -> dict[str, int]:
    """Add up counts by name.

    Args:
        counts: this process's counts.
        group: the processes.

    Returns:
        The sums over all processes.
    """
    total: dict[str, int] = {}
    for text in group.gather_texts(json.dumps(counts)):
        for name, number in json.loads(text).items():
            total[name] = total.get(name, 0) + number
    return total


def seen_entries(ratings: Ratings, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """The ratings of each row, of the whole table, as a fitted model keeps them.

    Args:
        ratings: the ratings.
        level: what to take off their values.

    Returns:
        Where those of each row start, int64; their columns, int32; and their values. The same on every process. Over
        several processes a table of more than ``SEEN_LIMIT`` ratings is not brought together: nothing is kept then.
    """
    by_row, rows, columns = ratings.by_row, ratings.row_axis, ratings.column_axis
    counts = rows.gather(ratings.row_counts).cpu().long()
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    indices, values = by_row.indices().cpu(), by_row.values().cpu() - level
    if ratings.group.size == 1:
        return offsets, indices, values
    if ratings.n_ratings > SEEN_LIMIT:
        return torch.zeros_like(offsets), indices[:0], values[:0]
    if rows.is_shared:
        return offsets, rows.gather(indices), rows.gather(values)
    group, place = columns.group, offsets[:-1].clone()
    found = torch.empty(int(offsets[-1]), dtype=torch.int32), values.new_empty(int(offsets[-1]))
    for source in range(group.size):
        own = source == group.rank
        lengths = group.broadcast(by_row.counts.cpu() if own else None, source, torch.int32).long()
        positions = (place - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
        positions += torch.arange(len(positions))
        for part, target in zip((indices + columns.start, values), found, strict=True):
            target[positions] = group.broadcast(part if own else None, source, part.dtype)
        place += lengths
    return offsets, *found
