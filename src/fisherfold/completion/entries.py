"""From whatever holds ratings to row ids, column ids and values.

Accepted are pairs of ids with values, data frames of entries (``user``, ``item``, ``rating`` and the usual synonyms, or
``columns=``), sparse matrices (stored zeros are data) and matrices with NaN where nothing was observed. What could be
either entries or a matrix is rejected with both ways to say what is meant.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch

from fisherfold.completion.inference.features import as_times
from fisherfold.completion.ratings import Triplets
from fisherfold.plain import counted
from fisherfold.tables.frames import columns_of, frame_kind, numbers
from fisherfold.tables.ids import IdIndex, as_array, as_ids
from fisherfold.tables.roles import ENTRIES, PAIRS, may_hold_row_ids, named_columns, usual_columns

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
LARGEST = 1e300  # so that the sum of many is finite
_WEIGHTS = (1e-30, 1e30)  # between which a weight or a noise scale must lie
_WIDE_ARRAY = 5  # an array with so many columns can only be a matrix
_ENTRIES = "fit(X, columns=('user', 'item', 'rating')) with your names"
_PAIRS = "name them with columns=('user', 'item')"
_MATRIX = "if it is a matrix with one row per line, pass fit(X, matrix=True)"


@dataclass(frozen=True)
class Entries:
    """Observed entries, as they were given.

    Attributes:
        rows: the row id of each entry.
        columns: the column id of each entry.
        values: the values in float64, finite.
        names: the names of the three columns, where a data frame was given.
        frame: the library of that data frame, ``pandas`` or ``polars``.
        is_matrix: whether they were given as a matrix.
        weights: what each log likelihood is multiplied by; None if by 1.
        noise_scale: the standard deviation of each in units of that of an ordinary one; None if all are ordinary.
        times: when, as numbers.
        keys: what identifies each entry, for streams that deliver some of them again.
    """

    rows: Any
    columns: Any
    values: Floats
    names: tuple[str, str, str] = ("row", "column", "value")
    frame: str | None = None
    is_matrix: bool = False
    weights: Floats | None = None
    noise_scale: Floats | None = None
    times: Floats | None = None
    keys: Any = None

    def indexed(self) -> tuple[IdIndex, IdIndex, Codes, Codes]:
        """Number the ids."""
        row_ids, rows = IdIndex.fit(self.rows, "row")
        column_ids, columns = IdIndex.fit(self.columns, "column")
        return row_ids, column_ids, rows, columns

    def numbered(self, rows: Codes, columns: Codes) -> Triplets:
        """The entries with numbers in place of ids."""
        weights = self.weights
        if self.noise_scale is not None:
            precision = self.noise_scale**-2.0
            weights = precision if weights is None else precision * weights
        amounts = self.weights
        if amounts is None and weights is not None:
            amounts = np.ones(len(self.values))
        given = None if self.noise_scale is None else weights
        excess = None
        if self.weights is not None and weights is not None:
            excess = weights * (self.weights - 1)
        return Triplets(rows, columns, self.values, amounts, given, times=self.times, excess=excess)

    def at(self, positions: npt.NDArray[Any]) -> Entries:
        """Some of the entries."""
        parts: dict[str, Any] = {"values": self.values[positions]}
        for name in ("rows", "columns", "keys"):
            if (given := getattr(self, name)) is not None:
                parts[name] = as_array(given)[positions]
        for name in ("weights", "noise_scale", "times"):
            if (given := getattr(self, name)) is not None:
                parts[name] = given[positions]
        return replace(self, **parts)

    def merged(self, rule: str) -> Entries:
        """Each pair once; what ``mean`` knows of replicates is lost."""
        row_ids, column_ids, rows, columns = self.indexed()
        found = self.numbered(rows, columns).merged(rule, (row_ids, column_ids))
        if len(found) == len(self.values):
            return self
        return replace(
            self,
            rows=row_ids.decode(found.rows),
            columns=column_ids.decode(found.columns),
            values=found.values,
            weights=found.amounts,
            noise_scale=None,
            times=found.times,
            keys=None,
        )

    def pair_numbers(self) -> Codes:
        """A number for each entry, the same for entries of one pair, in the order of their first ones."""
        _, _, rows, columns = self.indexed()
        return pair_numbers(rows, columns)

    def with_extras(
        self, *, weights: Any = None, noise_scale: Any = None, times: Any = None, keys: Any = None
    ) -> Entries:
        """The same entries with weights, scales of noise, times and keys, checked; those of weight 0 are left out."""
        count = len(self.values)
        if self.is_matrix and any(x is not None for x in (weights, noise_scale, times, keys)):
            raise ValueError(
                "time, sample_weight, noise_scale and ids need entries: pass pairs of ids, or a data frame"
            )
        checked = replace(
            self,
            weights=_positive(weights, count, "sample_weight", zero=True),
            noise_scale=_positive(noise_scale, count, "noise_scale"),
            times=None if times is None else as_times(times, count),
            keys=None if keys is None else as_ids(keys, "event"),
        )
        if checked.keys is not None and len(checked.keys) != count:
            raise ValueError(
                f"ids must hold one key per entry, got {len(checked.keys)} for {count}"
            )
        if checked.weights is None or (checked.weights > 0).all():
            return checked
        if not (checked.weights > 0).any():
            raise ValueError(
                "sample_weight must not be zero for all entries: nothing is left to fit"
            )
        return checked.at(np.flatnonzero(checked.weights > 0))


def pair_numbers(rows: Codes, columns: Codes) -> Codes:
    """A number for each entry, the same for entries of one pair, in the order of their first ones."""
    key = rows.astype(np.int64) * (int(columns.max(initial=0)) + 1) + columns
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[place], dtype=np.int64)


def _positive(values: Any, count: int, name: str, *, zero: bool = False) -> Floats | None:
    """Positive numbers, one per entry."""
    if values is None:
        return None
    found = numbers(values, name)
    if len(found) != count:
        raise ValueError(f"{name} must hold one number per entry, got {len(found)} for {count}")
    low, high = _WEIGHTS
    good = (found >= low) & (found <= high)
    good |= zero & (found == 0)
    if not good.all():
        least = "0 or between" if zero else "between"
        raise ValueError(
            f"{name} must be {least} {low:g} and {high:g}, got {found[~good][0]:g} at position "
            f"{int(np.argmin(good))}"
        )
    return found


def mixed(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hashes of 64 bits; splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
    return keys ^ (keys >> np.uint64(31))


def read_entries(
    X: Any,
    y: Any = None,
    *,
    columns: Any = None,
    matrix: bool | None = None,
    implicit: bool = False,
) -> Entries:
    """Read ratings in any of the accepted forms; pairs without values too, of weight 1, if they are implicit."""
    if isinstance(X, Entries):
        return X
    X = _known(X)
    if y is not None:
        rows, cols, names, kind = read_pairs(X, columns)
        values = numbers(y, "y")
        if len(values) != len(rows):
            given = f"{counted(len(rows), 'pair')} and {counted(len(values), 'value')}"
            raise ValueError(f"X and y must have one length, got {given}")
        return _checked(Entries(rows, cols, values, (*names, "value"), kind))
    if scipy.sparse.issparse(X):
        coo = scipy.sparse.coo_array(X)
        rows, cols = (np.asarray(part, dtype=np.int64) for part in coo.coords)
        return _checked(Entries(rows, cols, numbers(coo.data, "the matrix"), is_matrix=True))
    if frame_kind(X) is not None:
        return _from_wide_frame(X) if matrix else _from_frame(X, columns, implicit)
    if isinstance(X, (str, os.PathLike)):
        raise TypeError(
            f"X is a path; read it first, for example with polars.read_csv({os.fspath(X)!r})"
        )
    array = np.asarray(unmasked(X))
    if implicit and not matrix and array.shape[1:] == (2,):
        rows, cols, (row, column), _ = read_pairs(X)
        return _checked(Entries(rows, cols, np.ones(len(array)), (row, column, "weight")))
    if array.ndim != 2:
        raise ValueError(
            f"X must be pairs with y, a data frame of entries or a matrix, got shape {array.shape}. Reshape your data"
        )
    if not matrix and array.shape[1] < _WIDE_ARRAY:
        raise ValueError(
            f"X has {array.shape[1]} columns and no y: if these are entries, pass fit(X[:, :2], X[:, 2]); {_MATRIX}"
        )
    try:
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"a matrix with holes must hold numbers and NaN, got dtype {array.dtype}"
        ) from None
    return _from_matrix(array, None, None)


def read_pairs(X: Any, columns: Any = None) -> tuple[Any, Any, tuple[str, str], str | None]:
    """Row ids and column ids of a table of pairs."""
    X = _known(X)
    if scipy.sparse.issparse(X):
        raise TypeError(
            "pairs of ids cannot be a sparse matrix; pass fit(M) without y, or an (n, 2) array of ids"
        )
    if (kind := frame_kind(X)) is not None:
        table = columns_of(X)
        row, column = _pair_columns(list(table), columns)
        return table[row], table[column], (str(row), str(column)), kind
    if (
        isinstance(X, (list, tuple))
        and X
        and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in X)
    ):
        rows, cols = zip(*X, strict=True)
        return list(rows), list(cols), ("row", "column"), None
    array = np.asanyarray(X)
    if array.dtype.kind == "c":
        raise ValueError("Complex data not supported: ids must be integers or text")
    if array.ndim != 2 or array.shape[1] != 2:
        few = (
            f"0 feature(s) (shape={array.shape}) while a minimum of 2 is required. "
            if 0 in array.shape[1:]
            else ""
        )
        size = (
            f" (n_samples={array.shape[0]}, n_features={array.shape[1]})" if array.ndim == 2 else ""
        )
        raise ValueError(
            f"{few}X must have shape (n, 2) with a row id and a column id in each line, got shape {array.shape}{size}. "
            "Reshape your data, or pass a matrix with holes as fit(M) without y"
        )
    return array[:, 0], array[:, 1], ("row", "column"), None


def _pair_columns(given: list[Any], columns: Any) -> list[Any]:
    if columns is not None:
        return named_columns(given, columns, PAIRS)
    try:
        return usual_columns(given, PAIRS)
    except LookupError as error:
        if len(given) == 2:
            return given
        raise ValueError(
            f"X must have 2 columns (row id, column id), got {len(given)}: {error}; {_PAIRS}"
        ) from None


def _from_frame(X: Any, columns: Any, implicit: bool) -> Entries:
    table = columns_of(X)
    given = list(table)
    try:
        if columns is not None:
            names = named_columns(given, columns, ENTRIES, least=2 if implicit else 3)
        elif implicit and len(given) == 2:
            names = _pair_columns(given, None)
        else:
            names = usual_columns(given, ENTRIES, optional=implicit)
    except LookupError as error:
        raise ValueError(f"{error}: if X holds entries, pass {_ENTRIES}; {_MATRIX}") from None
    row, column, value = names if len(names) == 3 else (*names, "weight")
    values = (
        numbers(table[value], f"column {str(value)!r}")
        if len(names) == 3
        else np.ones(len(table[row]))
    )
    return _checked(
        Entries(
            table[row], table[column], values, (str(row), str(column), str(value)), frame_kind(X)
        )
    )


def _from_wide_frame(X: Any) -> Entries:
    table = columns_of(X)
    for name in table:
        fill = getattr(X[name].dtype, "fill_value", np.nan) if hasattr(X, "iloc") else np.nan
        if not np.isnan(fill):
            raise ValueError(
                f"column {name!r} is sparse with the fill value {fill}, which is data here; pass X.sparse.to_coo() if "
                "what is not stored was not observed, X.sparse.to_dense() if it is data"
            )
    first = next(iter(table), None)
    row, column = (getattr(getattr(X, axis, None), "name", None) for axis in ("index", "columns"))
    row_ids = X.index if hasattr(X, "iloc") else None
    ids = table[first].tolist() if may_hold_row_ids(first) else []
    if ids and len(set(ids)) == len(ids) and all(isinstance(value, (int, str)) for value in ids):
        row, row_ids = first, table.pop(first)
    if row == column:
        row = column = None
    whole = np.column_stack(
        [numbers(values, f"column {str(name)!r}") for name, values in table.items()]
    )
    names = (str(row or "row"), str(column or "column"), "value")
    return replace(_from_matrix(whole, row_ids, list(table)), names=names, frame=frame_kind(X))


def _from_matrix(table: Floats, row_ids: Any, column_ids: Any) -> Entries:
    rows, columns = np.nonzero(~np.isnan(table))
    values = table[rows, columns]
    row_labels = rows if row_ids is None else np.asarray(row_ids)[rows]
    column_labels = columns if column_ids is None else np.asarray(column_ids)[columns]
    return _checked(Entries(row_labels, column_labels, values, is_matrix=True))


def _checked(found: Entries) -> Entries:
    values = found.values
    if len(values) == 0:
        raise ValueError(
            "there are no ratings: found 0 observed entries (0 sample(s)), at least 1 is needed"
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        k = int(bad[0])
        raise ValueError(
            f"the values must be finite: {len(bad)} of {len(values)} contain NaN or infinity, the first is {values[k]} "
            f"at row {_at(found.rows, k)!r}, column {_at(found.columns, k)!r}; leave such entries out"
        )
    if (largest := float(np.abs(values).max())) > LARGEST:
        raise ValueError(
            f"the values must be of absolute value {LARGEST:g} at most, got {largest:g}"
        )
    return found


def _at(ids: Any, k: int) -> Any:
    value = ids.iloc[k] if hasattr(ids, "iloc") else ids[k]
    return value.item() if hasattr(value, "item") else value


def unmasked(X: Any) -> Any:
    """Masked entries as NaN, and tensors as arrays."""
    if np.ma.isMaskedArray(X):
        return np.ma.filled(X.astype(np.float64), np.nan)
    if isinstance(X, torch.Tensor):
        if X.layout != torch.strided:
            raise TypeError(f"dense numbers are needed here, got a tensor of layout {X.layout}")
        return X.detach().cpu().double().numpy() if not X.is_complex() else X.detach().cpu().numpy()
    return X


def _known(X: Any) -> Any:
    """Sparse tensors as sparse matrices."""
    if isinstance(X, torch.Tensor) and X.layout != torch.strided:
        coo = X.detach().cpu().to_sparse(layout=torch.sparse_coo).coalesce()
        if coo.sparse_dim() != 2 or coo.dense_dim() != 0:
            raise ValueError(
                f"a sparse tensor must be a matrix of numbers, got shape {tuple(coo.shape)}"
            )
        return scipy.sparse.coo_array(
            (coo.values().double().numpy(), coo.indices().numpy()), shape=tuple(coo.shape)
        )
    return X
