"""Tables in shares: the ids, the entries, their order and the fitted model are those of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from fisherfold import MatrixCompletion, MatrixCompletionCV
from fisherfold.completion.entries import Entries
from fisherfold.distributed import Group, balanced_cuts
from fisherfold.tables.readers import read_ratings
from toy import slow

from ranks import compare, on_ranks, same_bits  # isort: skip

OPTIONS: dict[str, Any] = {"rank": 2, "max_iter": 4, "tol": 0.0, "dtype": "float64"}


def table(folder: Path) -> None:
    """Ratings of more rows than columns, in no order, some pairs twice; ids are numbers, and names for some rows."""
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(23, 2)) @ rng.normal(size=(2, 13))
    rows, columns = np.nonzero(rng.random(x.shape) < 0.5)
    order = rng.permutation(len(rows))
    order = np.append(order, order[:9])
    values = x[rows[order], columns[order]] + np.arange(len(order)) % 3
    frame = pl.DataFrame({"user": rows[order], "item": columns[order], "value": values})
    frame.write_parquet(folder / "numbers.parquet")
    (folder / "parts").mkdir()
    for k, start in enumerate(range(0, len(frame), 40)):  # as Spark writes a table
        frame[start : start + 40].write_parquet(
            folder / "parts" / f"part-{k:05}.snappy.parquet", compression="snappy"
        )
        (folder / "parts" / f".part-{k:05}.snappy.parquet.crc").write_bytes(b"crc")
    (folder / "parts" / "_SUCCESS").touch()
    named = (
        pl.when(pl.col("user") % 3 > 0)
        .then(pl.format("ü{}", "user"))
        .otherwise(pl.col("user").cast(pl.String))
    )
    frame.with_columns(user=named).write_csv(folder / "names.csv")


def described(model: MatrixCompletion) -> dict[str, Any]:
    inside = model.model_
    pairs = [(r, c) for r in model.row_ids_.tolist()[:5] for c in model.column_ids_.tolist()[:3]]
    means = model.predict(pairs, return_std=inside.inference == "variational")
    parts = means if isinstance(means, tuple) else (means,)
    return {
        "predictions": [torch.from_numpy(part) for part in parts],
        "seen": [
            torch.from_numpy(getattr(inside.given(), name))
            for name in ("rows", "columns", "values")
        ],
        "ids": [
            [str(label) for label in ids.tolist()] for ids in (model.row_ids_, model.column_ids_)
        ],
        "numbers": [
            inside.center,
            inside.scale,
            inside.low,
            inside.high,
            inside.posterior.noise_precision,
        ],
        "tables": [side.mean for side in (inside.posterior.rows, inside.posterior.columns)],
        "merged": inside.n_merged,
        "ratings": inside.posterior.n_ratings,
        "names": list(model.names_),
    }


CASES: list[tuple[str, dict[str, Any]]] = [
    ("names.csv", {"duplicates": "mean"}),
    ("numbers.parquet", {"duplicates": "last"}),
    ("names.csv", {"duplicates": "sum"}),
    ("parts", {"inference": "point"}),
    ("parts", {}),
    ("names.csv", {"inference": "point", "offsets": "none", "ridge": 0.5}),
]


def fit_all(folder: str) -> list[Any]:
    found = [
        described(MatrixCompletion(**OPTIONS, **how).fit_file_share(Path(folder) / name))
        for name, how in CASES
    ]
    group, whole = Group(), read_ratings(Path(folder) / "names.csv")
    pairs = pl.DataFrame({"row": whole.rows.tolist(), "column": whole.columns})
    # the first rank has most, the last one nothing
    edges = [0, *(len(pairs) - 5 + k for k in range(group.size - 2)), len(pairs), len(pairs)]
    mine = slice(edges[group.rank], edges[group.rank + 1]) if group.size > 1 else slice(None)
    empty = group.size > 1 and group.rank == group.size - 1
    model = MatrixCompletion(**OPTIONS)
    found.append(
        described(
            model.fit_share(None if empty else pairs[mine], None if empty else whole.values[mine])
        )
    )
    return found


def fit_alone(folder: Path) -> list[Any]:
    found: list[Any] = []
    for name, options in [*CASES, ("names.csv", {})]:
        read = read_ratings(folder / name)
        names = (
            ("row", "column", "value") if len(found) == len(CASES) else ("user", "item", "value")
        )
        given = Entries(read.rows, read.columns, read.values, names, "polars")
        found.append(described(MatrixCompletion(**OPTIONS, **options).fit_entries(given)))
    return found


@pytest.mark.parametrize("world", [2, *slow(1, 3, 4)])
def test_shares_of_a_table_give_the_model_of_one_process(world: int, tmp_path: Path) -> None:
    table(tmp_path)
    ranks = on_ranks(world, tmp_path, fit_all, str(tmp_path))
    same_bits(ranks)
    for expected, found in zip(fit_alone(tmp_path), ranks[0], strict=True):
        compare(expected, found, rtol=1e-7, atol=1e-8)


def faults(folder: str) -> list[str]:
    found, rank = [], Group().rank
    pairs, values = [(1, 1), (1, 1 + rank)], [1.0, float("nan") if rank else 2.0]
    for call in (
        lambda: MatrixCompletion(rank=1).fit_file_share(Path(folder) / "absent.csv"),
        lambda: MatrixCompletion(rank=1).fit_share(pairs, values),
        lambda: MatrixCompletion(rank=1, duplicates="error").fit_share([("ann", 5)], [1.0]),
        lambda: MatrixCompletion(rank=1).fit_share(None),
        lambda: MatrixCompletion(rank=1 + rank).fit_share([(1, 2)], [1.0]),
        lambda: MatrixCompletionCV().fit_share([(1, 2)], [1.0]),
        lambda: MatrixCompletion(inference="point").fit_share(
            [(1, 2)], [1.0], checkpoint=f"{folder}/c"
        ),
        *(
            lambda kind=kind: MatrixCompletion(rank=1, likelihood=kind).fit_share(
                [(1, 2), (2, 1)], [0.0, 1.0]
            )
            for kind in ("ordered", "binary")
        ),
    ):
        try:
            call()
            found.append("nothing")
        except (ValueError, OSError) as error:
            found.append(str(error))
    return found


def test_a_fault_of_one_rank_is_told_by_all(tmp_path: Path) -> None:
    ranks = on_ranks(2, tmp_path, faults, str(tmp_path))
    assert ranks[0] == ranks[1]
    expected = [
        "rank 0: there is no file .*absent.csv",
        "rank 1: the values must be finite",
        "entry repeats a pair .* row 'ann', column 5",
        "there are no ratings: found 0 observed entries on all ranks",
        "all ranks must be given the same options: rank is 1 on rank 0 and 2 on rank 1",
        "the rank must be given; choose it in one process",
        "checkpoint needs inference='variational'",
        "likelihood='ordered' needs a fit in one process",
        "likelihood='binary' needs a fit in one process",
    ]
    for message, pattern in zip(ranks[0], expected, strict=True):
        assert re.search(pattern, message), (pattern, message)


def stopped(folder: str) -> Any:
    """A fit that is stopped after its third pass on every rank, then resumed; and one that is not stopped."""
    from fisherfold.completion import distributed_fit

    rng, group = np.random.default_rng(3), Group()
    x = rng.normal(size=(30, 2)) @ rng.normal(size=(2, 20)) + 0.1 * rng.normal(size=(30, 20))
    pairs = np.argwhere(rng.random(x.shape) < 0.5)[group.rank :: group.size]
    given = pairs, x[pairs[:, 0], pairs[:, 1]]
    options = OPTIONS | {"max_iter": 6}
    whole = described(MatrixCompletion(**options).fit_share(*given))
    save, passes = distributed_fit.FitCheckpoint.save, []

    def save_and_stop(self: Any, *state: Any) -> None:
        save(self, *state)
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt

    distributed_fit.FitCheckpoint.save = save_and_stop  # type: ignore[method-assign]
    try:
        MatrixCompletion(**options).fit_share(*given, checkpoint=f"{folder}/c")
    except KeyboardInterrupt:
        passes.append(1)
    resumed = described(MatrixCompletion(**options).fit_share(*given, checkpoint=f"{folder}/c"))
    return [len(passes), whole, resumed, Path(f"{folder}/c").exists()]


def test_a_stopped_fit_resumes_to_the_same_bits(tmp_path: Path) -> None:
    for passes, whole, resumed, kept in on_ranks(2, tmp_path, stopped, str(tmp_path)):
        assert (passes, kept) == (7, True)  # three, the interrupt, and the other three
        same_bits([whole, resumed])


def test_shares_are_cut_by_weight() -> None:
    assert balanced_cuts([1] * 10, 4) == [0, 2, 5, 7, 10]
    assert balanced_cuts([100, 1, 1], 3) == [0, 0, 1, 3]
    assert balanced_cuts([], 2) == [0, 0, 0]
