"""Tables read in shares: the ids, the entries, their order and the fitted model are those of one process."""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherfold import MatrixCompletion
from fisherfold.completion.shared_ratings import Share, share_out
from fisherfold.distributed import ALONE, Group, balanced_cuts
from fisherfold.tables import file_shares, tables
from fisherfold.tables.file_shares import FileShare, RatingShare
from fisherfold.tables.inputs import Observations
from fisherfold.tables.table_files import read_table

from ranks import compare, on_ranks, same_bits  # isort: skip

OPTIONS: dict[str, Any] = {"rank": 2, "max_iter": 4, "tol": 0.0, "dtype": "float64"}


def table(path: Path, *, names: bool) -> None:
    """Ratings of more rows than columns, in no order, some pairs twice, some lines unusable."""
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(23, 2)) @ rng.normal(size=(2, 13))
    rows, columns = np.nonzero(rng.random(x.shape) < 0.5)
    order = rng.permutation(len(rows))
    again = order[:9]
    lines = [(f"ü{r}" if names and r % 3 else str(r), str(c), f"{x[r, c]:.4f}")
             for r, c in zip(rows[order], columns[order], strict=True)]  # fmt: skip
    lines += [(lines[k][0], lines[k][1], f"{k}.5") for k in range(len(again))]
    lines += [("", "3", "1"), ("1", "2", "many"), ("1", "2", "inf"), ("1", "2", "")]
    frame = pl.DataFrame({name: [line[k] for line in lines] for k, name in enumerate(("user", "item", "value"))})
    frame.write_csv(path / "names.csv" if names else path / "numbers.csv")
    if names:
        european = frame.with_columns(pl.col("value").str.replace(".", ",", literal=True))
        european.write_csv(path / "commas.csv", separator=";")
        european.write_parquet(path / "commas.parquet")
    else:
        good = frame.filter(pl.col("value").cast(pl.Float64, strict=False).is_finite() & (pl.col("user") != ""))
        good = good.with_columns(pl.col("user", "item").cast(pl.Int64), pl.col("value").cast(pl.Float64))
        good.write_parquet(path / "numbers.parquet", row_group_size=40)


def described(model: MatrixCompletion) -> dict[str, Any]:
    inside = model.model_
    pairs = [(r, c) for r in inside.row_ids.labels.tolist()[:5] for c in inside.column_ids.labels.tolist()[:3]]
    means = model.predict(np.array(pairs, dtype=object), return_std=inside.inference == "variational")
    parts = means if isinstance(means, tuple) else (means,)
    seen = [inside.seen_offsets, inside.seen_columns, inside.seen_values]
    ids = [[str(label) for label in index.labels.tolist()] for index in (inside.row_ids, inside.column_ids)]
    numbers = [inside.center, inside.scale, inside.low, inside.high, inside.posterior.noise_precision]
    tables_ = [side.mean for side in (inside.posterior.rows, inside.posterior.columns)]
    return {
        "predictions": [torch.from_numpy(part) for part in parts], "seen": seen, "ids": ids, "numbers": numbers,
        "tables": tables_, "merged": inside.n_merged, "ratings": inside.posterior.n_ratings,
    }  # fmt: skip


CASES = [
    ("names.csv", {"duplicates": "mean"}), ("numbers.csv", {"duplicates": "last"}),
    ("numbers.csv", {"duplicates": "sum"}), ("numbers.parquet", {"inference": "point"}),
    ("names.csv", {"inference": "point", "offsets": "none", "ridge": 0.5}),
    ("commas.csv", {"duplicates": "last"}), ("commas.parquet", {"duplicates": "last"}),
]  # fmt: skip


def fit_all(folder: str) -> list[Any]:
    found: list[Any] = []
    for name, options in CASES:
        model = MatrixCompletion(**OPTIONS, **options).fit_file_share(Path(folder) / name)
        found.append(described(model) | {"lines": model.n_read_, "refused": model.refused_})
    group = Group()
    whole = tables.read_ratings(Path(folder) / "numbers.csv")
    pairs = np.stack([whole.rows, whole.columns], axis=1)
    # the first rank has most, the last one nothing
    edges = [0, *(len(pairs) - 5 + k for k in range(group.size - 2)), len(pairs), len(pairs)]
    edges = [0, len(pairs)] if group.size == 1 else edges
    mine = slice(edges[group.rank], edges[group.rank + 1])
    model = MatrixCompletion(**OPTIONS)
    empty = group.size > 1 and group.rank == group.size - 1
    found.append(described(model.fit_share(None if empty else pairs[mine], None if empty else whole.values[mine])))
    return found


def fit_alone(folder: Path) -> list[Any]:
    found: list[Any] = []
    for name, options in [*CASES, ("numbers.csv", {})]:
        read = tables.read_ratings(folder / name)
        given = Observations(read.rows, read.columns, read.values, read.rows, read.columns)
        found.append(described(MatrixCompletion(**OPTIONS, **options).fit_observations(given)))
        if len(found) <= len(CASES):
            found[-1] |= {"lines": read.n_read, "refused": read.refused}
    return found


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_shares_of_a_file_give_the_model_of_one_process(world: int, tmp_path: Path) -> None:
    for names in (False, True):
        table(tmp_path, names=names)
    ranks = on_ranks(world, tmp_path, fit_all, str(tmp_path))
    same_bits(ranks)
    alone = fit_alone(tmp_path)
    for expected, found in zip(alone, ranks[0], strict=True):
        compare(expected, found, rtol=1e-7, atol=1e-8)


def fit_without_noise() -> list[Any]:
    group, rng = Group(), np.random.default_rng(0)
    x = rng.normal(size=(60, 3)) @ rng.normal(size=(3, 40))
    pairs = np.argwhere(rng.random(x.shape) < 0.4)
    mine = pairs[group.rank :: group.size]
    found: list[Any] = []
    for dtype in ("float32", "float64"):
        model = MatrixCompletion(rank=3, dtype=dtype).fit_share(mine, x[mine[:, 0], mine[:, 1]])
        error = model.predict(np.argwhere(x < np.inf)) - x.reshape(-1)
        found.append([torch.from_numpy(error / x.std()), len(model.trace_)])
    return found


def test_without_noise_ranks_differ_by_what_the_dtype_can_hold(tmp_path: Path) -> None:
    """Residuals are differences of squares: noise below √floor, 1e-3 in float32 and 1e-6 in float64, is rounding."""
    ranks = {world: on_ranks(world, tmp_path, fit_without_noise) for world in (1, 2)}
    same_bits(ranks[2])
    for (one, _), (two, _), resolved in zip(ranks[1][0], ranks[2][0], (1e-3, 1e-6), strict=True):
        assert float(one.abs().max()) < resolved
        compare(one, two, rtol=0, atol=resolved)


def faults(folder: str) -> list[str]:
    found = []
    group = Group()
    names = "absent.csv", "packed.csv", "empty.csv", "words.csv", "mixed.csv", "rows.csv", "wide.csv", "wide.parquet"
    for name in names:
        try:
            MatrixCompletion(rank=1).fit_file_share(Path(folder) / name)
        except (ValueError, FileNotFoundError) as error:
            found.append(str(error))
    for share in ([("a", "b")], [(1, ("x",))] if group.rank else [(1, "x")]):
        try:
            MatrixCompletion(rank=1).fit_share(np.array(share, dtype=object), [float("nan")] if group.rank else [1.0])
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def test_a_fault_of_one_rank_is_told_by_all(tmp_path: Path) -> None:
    (tmp_path / "packed.csv").write_bytes(b"\x1f\x8b....")
    (tmp_path / "empty.csv").write_text("user,item,value\n")
    (tmp_path / "words.csv").write_text("user,item,value\na,b,c\n")
    # the share of the second rank alone would be read with commas, that of the first with points
    mixed = "a;b;2.5\n" * 20 + "\n" + "a;b;3\n" * 9 + "a;b;2,5\n" * 10
    (tmp_path / "mixed.csv").write_text("user;item;value\n" + mixed)
    matrix = np.random.default_rng(0).integers(1, 5, size=(40, 6))
    pl.DataFrame(matrix + 0.5, orient="row").write_csv(tmp_path / "wide.csv")
    pl.DataFrame(matrix + 0.5, orient="row").write_parquet(tmp_path / "wide.parquet")
    matrix[:, 0] = np.arange(40)
    pl.DataFrame(matrix, orient="row").write_csv(tmp_path / "rows.csv")
    ranks = on_ranks(2, tmp_path, faults, str(tmp_path))
    assert ranks[0] == ranks[1]
    with pytest.raises(ValueError, match="data line 30") as alone:
        tables.read_ratings(tmp_path / "mixed.csv")
    expected = [
        "there is no file", "is packed with gzip", "none of 0 lines", "none of 1 line .*not a number",
        re.escape(str(alone.value)), "looks like a matrix.*no row id in column 'column_0' occurs twice",
        "wide.csv looks like a matrix.*holds [1-4].5", "wide.parquet looks like a matrix.*holds [1-4].5",
        "rank 1: .*finite", "rank 1: .*finite",
    ]  # fmt: skip
    for message, pattern in zip(ranks[0], expected, strict=True):
        assert re.search(pattern, message), (pattern, message)


class Pretended(Group):
    """One rank of several, for what needs no other one but the counts of quotation marks before it."""

    def __init__(self, rank: int, counts: list[int]) -> None:
        self.rank, self.size, self.counts = rank, len(counts), counts

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        yield

    def gather_texts(self, text: str) -> list[str]:
        return [text] * self.size

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        assert int(part) == self.counts[self.rank]
        return torch.tensor(self.counts)


def long_table(folder: str) -> tuple[int, list[str]]:
    model = MatrixCompletion(rank=1, max_iter=1).fit_file_share(Path(folder) / "long.csv")
    return len(model.model_.row_ids), model.columns_unexplained_


def test_entries_whose_rows_come_again_on_another_rank_are_no_matrix(tmp_path: Path) -> None:
    lines = [f"{row},{column},{row % 3 + column},0,{column}" for column in range(2) for row in range(1500)]
    (tmp_path / "long.csv").write_text("\n".join(["row,column,value,zero,again", *lines, ""]))
    assert on_ranks(2, tmp_path, long_table, str(tmp_path)) == [(1500, ["zero", "again"])] * 2


def test_a_byte_order_mark_inside_a_file_belongs_to_its_id(tmp_path: Path) -> None:
    path = tmp_path / "joined.csv"  # two files with marks, one behind the other
    path.write_text("\ufeffuser,item,value\n" + "1,2,3.5\n" * 4 + "\ufeff1,2,3.5\n" * 4, encoding="utf-8")
    counts = [0] * path.stat().st_size  # one byte for each rank: every line is the first of one
    parts = [piece for rank in range(len(counts)) for piece in FileShare(path, Pretended(rank, counts)).pieces()]
    users = pl.concat([part.frame for part in parts])["user"].to_list()
    assert users == read_table(path).frame["user"].to_list() == ["1"] * 4 + ["\ufeff1"] * 4


FIELD = st.text(st.sampled_from('aß"\n, '), max_size=4).map(lambda t: '"' + t.replace('"', '""') + '"')


@settings(max_examples=60)
@given(st.lists(st.tuples(FIELD, st.integers(0, 99)), min_size=1, max_size=12), st.integers(1, 5),
       st.sampled_from([5, 16, 2**20]), st.booleans(), st.sampled_from(["", "\n", "\r\n\n" * 30]),
       st.booleans())  # fmt: skip
def test_byte_ranges_cut_a_file_into_its_lines(
    lines: Any, world: int, block: int, ended: bool, lead: str, mark: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(file_shares, "BLOCK", block)
        path = Path(folder) / "t.csv"
        text = "name,item,value\n" + "\n".join(f"{name},{item},1.5" for name, item in lines) + "\n" * ended
        text = "\ufeff" * mark + lead + text
        content = text.encode()
        path.write_bytes(content)
        table = content.index(b"name") if lead else 0
        edges = [0, *(table + (len(content) - table) * k // world for k in range(1, world + 1))]
        counts = [content[a:b].count(b'"') for a, b in itertools.pairwise(edges)]
        parts = [piece for rank in range(world) for piece in FileShare(path, Pretended(rank, counts)).pieces()]
        whole = read_table(path)
        assert pl.concat([part.frame for part in parts if part.frame.height]).equals(whole.frame)
        assert sum(sum(part.refused.values()) for part in parts) == sum(whole.refused.values())


def test_shares_are_cut_by_weight() -> None:
    assert balanced_cuts([1] * 10, 4) == [0, 2, 5, 7, 10]
    assert balanced_cuts([100, 1, 1], 3) == [0, 0, 1, 3]
    assert balanced_cuts([], 2) == [0, 0, 0]


def test_a_stream_of_batches_equals_the_table(tmp_path: Path) -> None:
    table(tmp_path, names=False)
    file = FileShare(tmp_path / "numbers.csv", ALONE)
    ready = share_out(
        Share(RatingShare(file, ALONE).batches), ALONE, dtype=torch.float64, duplicates="mean", centred=True
    )
    read = tables.read_ratings(tmp_path / "numbers.csv")
    assert ready.center == pytest.approx(read.values.mean(), rel=1e-13)
    assert ready.scale == pytest.approx(read.values.std(), rel=1e-13)
    assert ready.ratings.n_ratings + ready.ratings.n_duplicates == len(read.values)
