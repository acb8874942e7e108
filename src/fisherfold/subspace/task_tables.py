"""Rows of many tasks from a file: which columns are features, which is the target, which names the task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from fisherfold.distributed import Group
from fisherfold.tables.decimals import numbers, parse
from fisherfold.tables.file_shares import FileShare
from fisherfold.tables.ids import IdIndex, id_array
from fisherfold.tables.table_files import flat, id_text, read_table
from fisherfold.tables.table_sources import spoken
from fisherfold.tables.tables import require_ids, whole_or_text
from fisherfold.tables.text_tables import TextTable


@dataclass(frozen=True)
class Roles:
    """What the columns of a table stand for.

    Attributes:
        features: the feature columns, in order.
        target: the target column.
        task: the column that names the task, or None for a single task.
        estimator: the class that was fitted to them.
    """

    features: list[str]
    target: str
    task: str | None
    estimator: str

    @classmethod
    def of(cls, model: Any, folder: str | Path) -> Roles:
        """The roles that were kept with a model.

        Args:
            model: a model that was loaded.
            folder: its folder, for messages.

        Returns:
            The roles.

        Raises:
            ValueError: if it has none, or they are not sound.
        """
        kept = getattr(model, "_columns", None)
        if kept is None:
            raise ValueError(f"{folder} is no model of `fisherfold subspace fit`: it does not name its columns")
        names = kept.get("features") if isinstance(kept, dict) else None
        if not isinstance(names, list) or not all(isinstance(n, str) for n in [*names, kept.get("target")]):
            raise ValueError(f"{folder} is not a sound model: its columns are no names")
        task = kept.get("task")
        return cls(list(names), kept["target"], None if task is None else str(task), type(model).__name__)


@dataclass(frozen=True)
class TaskTable:
    """Rows read from a file.

    Attributes:
        frame: the whole table as it stands.
        X: the features as numbers.
        y: the targets, or None if they were not asked for.
        task: one id per row, or None.
        refused: how many lines are no records, by reason; a record with a bad cell is an error.
        decimal: the decimal mark of its numbers.
    """

    frame: pl.DataFrame
    X: pl.DataFrame
    y: NDArray[Any] | None
    task: NDArray[Any] | None
    refused: dict[str, int] = field(default_factory=dict)
    decimal: str = "."

    def classes(self) -> list[Any]:
        """The distinct targets.

        Returns:
            Each once, in the order of the rows; none if targets were not asked for.
        """
        return [] if self.y is None else list(dict.fromkeys(self.y.tolist()))

    def known_to(self, model: Any) -> TaskTable:
        """The same rows with tasks and classes as a model has them: in one file 1 is a number, in another a name.

        Args:
            model: a fitted estimator.

        Returns:
            The table.
        """
        task, y = self.task, self.y
        if task is not None:
            task = model._index.meant(task)
        if y is not None and hasattr(model, "classes_"):
            y = IdIndex(id_array(model.classes_, "class")).meant(y)
        return replace(self, task=task, y=y)


def choose_columns(
    frame: pl.DataFrame, *, target: str, task: str | None, features: list[str] | None, estimator: str
) -> Roles:
    """All columns but target and task are features unless some are named.

    Args:
        frame: the table.
        target: the target column.
        task: the task column.
        features: feature columns.
        estimator: the class to fit.

    Returns:
        The roles.

    Raises:
        ValueError: if a column does not exist, has two roles, or none is left; if none is named and one is the index
            of a data frame.
    """
    for option, name in (("--target", target), ("--task", task), *(("--features", f) for f in features or [])):
        if name is not None and name not in frame.columns:
            raise ValueError(f"{option} {name}: there is no such column; the columns are {', '.join(frame.columns)}")
    if target == task:
        raise ValueError(f"--target and --task must be two columns, both are {target}")
    if target in (features or []):
        raise ValueError(f"--features must not contain the target, {target}")
    if len(set(features or [])) < len(features or []):
        raise ValueError(f"--features must name each column once, got {', '.join(features or [])}")
    chosen = features or [name for name in frame.columns if name not in {target, task}]
    if not chosen:
        raise ValueError("no feature columns are left besides the target and the task")
    if features is None and (index := [name for name in chosen if _is_index(name, frame.columns)]):
        raise ValueError(
            f"the column {index[0]} is the index of a data frame, numbers of lines and hardly a feature; write the "
            "file with index=False, or name the features (--features)"
        )
    return Roles(chosen, target, task, estimator)


def _is_index(name: str, columns: list[str]) -> bool:
    """Whether a column is what a data frame writes beside its own: to CSV first and without a name."""
    nameless = name == columns[0] == "column_1" and columns[1:2] != ["column_2"]
    return nameless or (name.startswith("__index_level_") and name.endswith("__"))


def read_tasks(
    path: str | Path, roles: Roles, *, with_target: bool, numeric_target: bool = True, decimal: str | None = None,
    **reading: Any,
) -> TaskTable:  # fmt: skip
    """Read rows by their roles.

    Args:
        path: a CSV, TSV or Parquet file; ``-`` for standard input.
        roles: what the columns stand for.
        with_target: whether the target is needed.
        numeric_target: whether it is a number (else a class).
        decimal: the decimal mark, ``.`` or ``,``; found out from all features and numeric targets if not given.
        **reading: the encoding of the file and the most it may unpack to, as in ``read_table``.

    Returns:
        The rows.
    """
    read = read_table(path, header=True, decimal=decimal, **reading)
    return rows_of(read, spoken(path), roles, with_target=with_target, numeric_target=numeric_target, decimal=decimal)


def rows_of(
    read: TextTable, path: str | Path, roles: Roles, *, with_target: bool, numeric_target: bool = True,
    decimal: str | None = None,
) -> TaskTable:  # fmt: skip
    """The rows of a table that has been read, by their roles.

    Args:
        read: the table.
        path: where it comes from, for messages.
        roles: what the columns stand for.
        with_target: whether the target is needed.
        numeric_target: whether it is a number (else a class).
        decimal: the decimal mark, as for ``read_tasks``.

    Returns:
        The rows.

    Raises:
        ValueError: if a column is missing, a cell is missing or no number, or there are no rows.
    """
    frame = read.frame
    needed = [*roles.features, *([roles.task] if roles.task else []), *([roles.target] if with_target else [])]
    if absent := [name for name in needed if name not in frame.columns]:
        raise ValueError(f"{path}: the columns {', '.join(absent)} are missing; it has {', '.join(frame.columns)}")
    if frame.is_empty():
        raise ValueError(f"{path} has no rows that can be used, lines refused: {read.refused or 'none'}")
    wanted = [*roles.features, *([roles.target] if with_target and numeric_target else [])]
    columns = [flat(frame[name], path, dates=False) for name in wanted]
    parsed, mark = numbers(columns, path, decimal)
    for column, values in zip(columns, parsed, strict=True):
        _finite(column, values, path, roles)
    X, y = pl.DataFrame(dict(zip(roles.features, parsed, strict=False))), None
    if with_target:
        y = parsed[-1].to_numpy() if numeric_target else _labels(frame[roles.target], path)
    task = None if roles.task is None else _labels(frame[roles.task], path)
    return TaskTable(frame, X, y, task, read.refused, mark)


def read_task_share(
    path: str | Path, group: Group, *, target: str, task: str | None, features: list[str] | None, estimator: str,
    decimal: str | None = None,
) -> tuple[Roles, TaskTable]:  # fmt: skip
    """Read the part of a file that is this process's share.

    Args:
        path: a CSV, TSV or Parquet file with a header.
        group: the processes.
        target: the target column.
        task: the task column; over several processes there must be one.
        features: feature columns; all others if not given.
        estimator: the class to fit.
        decimal: the decimal mark, ``.`` or ``,``; found out from all features and targets if not given.

    Returns:
        The roles, and the rows that are here; there may be none.

    Raises:
        ValueError: if there is no task column.
    """
    file = FileShare(path, group, header=True, decimal=decimal)
    with group.together():
        if task is None:
            raise ValueError("over several processes --task must name the column of the tasks")
        roles = choose_columns(
            pl.DataFrame(schema=file.columns), target=target, task=task, features=features, estimator=estimator
        )
    mark = file.decimal_mark([*roles.features, target], group)
    refused, parts, bad, lines = dict[str, int](), list[tuple[pl.DataFrame, Any, pl.Series]](), None, 0
    with group.together():
        for piece in file.pieces():
            for reason, count in piece.refused.items():
                refused[reason] = refused.get(reason, 0) + count
            try:
                parts.append(_checked_piece(piece.frame, path, roles, mark))
            except ValueError:
                bad = piece.frame
                break
            lines += piece.frame.height
    start = int(group.gather(torch.tensor([lines]))[: group.rank].sum())
    with group.together():
        if bad is not None:  # once more, now that its place in the whole file is known
            _checked_piece(bad, path, roles, mark, start + lines)
        labels = _labels(pl.concat([part[2] for part in parts]), path, start) if parts else np.zeros(0, dtype=np.int64)
    schema = dict.fromkeys(roles.features, pl.Float64)
    X = pl.concat([part[0] for part in parts]) if parts else pl.DataFrame(schema=schema)
    y = np.concatenate([part[1] for part in parts]) if parts else np.zeros(0)
    return roles, TaskTable(X, X, y, labels, refused, mark)


def _checked_piece(
    frame: pl.DataFrame, path: str | Path, roles: Roles, mark: str, before: int = 0
) -> tuple[pl.DataFrame, NDArray[Any], pl.Series]:
    """Features, targets and the text of the tasks of some rows, before which the file has others."""
    assert roles.task is not None
    columns = [flat(frame[name], path, dates=False) for name in [*roles.features, roles.target]]
    *found, last = [_finite(column, parse(column, mark), path, roles, before) for column in columns]
    X = pl.DataFrame(dict(zip(roles.features, found, strict=True)))
    return X, last.to_numpy(), id_text(frame[roles.task], path).cast(pl.String)


def _finite(column: pl.Series, parsed: pl.Series, path: str | Path, roles: Roles, before: int = 0) -> pl.Series:
    """The numbers of a column, in which every cell must be one; other lines may come before it."""
    bad = (parsed.is_null() | ~parsed.is_finite().fill_null(False)).arg_true()
    if len(bad):
        seen = column[int(bad[0])]
        what = "is missing" if seen is None or str(seen).strip() == "" else f"is {seen!r}, a number is expected"
        where = f"{path}: column {column.name!r} {what} in data line {before + int(bad[0]) + 1}"
        if len(bad) == len(column) and column.name == roles.target:
            where += "; for two classes in place of numbers fit with --classify"
        elif len(bad) == len(column):
            # a column without any number is hardly a feature
            where += f"; does it name the tasks (--task {column.name}), or should --features leave it out?"
        raise ValueError(where)
    return parsed


def _labels(column: pl.Series, path: str | Path, before: int = 0) -> NDArray[Any]:
    """Whole numbers if all are, text otherwise; none missing."""
    text = id_text(column, path).cast(pl.String)
    require_ids(text, f"{path}: column {column.name!r}", before)
    return whole_or_text(text)
