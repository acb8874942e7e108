"""The container holds every entry once by row and once by column, exactly, in at most 16 bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherfold.completion import segments
from fisherfold.completion.ratings import Ratings
from fisherfold.completion.segments import bag_sum


def dense(ratings, by_row):
    """The matrix with NaN at holes, read from one of the two orders."""
    side = ratings.by_row if by_row else ratings.by_column
    matrix = torch.full(ratings.shape if by_row else ratings.shape[::-1], float("nan"), dtype=ratings.dtype)
    matrix[side.groups().long(), side.indices().long()] = side.values()
    return matrix if by_row else matrix.T


def some_entries(rng, n, m, count, kind):
    flat = rng.choice(n * m, size=count, replace=False)
    values = rng.integers(1, 6, count).astype(float) if kind == "codes" else rng.standard_normal(count)
    return flat // m, flat % m, values


@pytest.mark.parametrize(
    ("dtype", "kind", "limit"),
    [
        (torch.float32, "raw", 16),
        (torch.float64, "codes", 12),
        (torch.float64, "raw", 16),
    ],
)
def test_both_orders_hold_the_matrix_within_16_bytes(dtype, kind, limit):
    rng = np.random.default_rng(0)
    rows, columns, values = some_entries(rng, 300, 400, 80_000, kind)
    ratings = Ratings(rows, columns, values, shape=(301, 400), dtype=dtype)
    expected = torch.full((301, 400), float("nan"), dtype=dtype)
    expected[rows, columns] = torch.as_tensor(values, dtype=dtype)
    for by_row in (True, False):
        torch.testing.assert_close(dense(ratings, by_row), expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(dense(ratings.T, by_row), expected.T, rtol=0, atol=0, equal_nan=True)
    overhead = 4 * (sum(ratings.shape) + 2) + 8 * 2 * 5
    assert ratings.nbytes <= limit * ratings.n_ratings + overhead
    assert ratings.dtype == dtype
    assert ratings.row_counts.sum() == 80_000
    assert ratings.mean == pytest.approx(values.mean(), abs=1e-6)


def test_many_distinct_float64_values_are_stored_once():
    rng = np.random.default_rng(1)
    rows, columns, values = some_entries(rng, 300, 300, 60_000, "raw")
    ratings = Ratings(rows, columns, values)
    assert ratings.by_row.source is ratings.by_column
    index, value = ratings.by_row.at(torch.tensor([5, 100]))
    assert index.tolist() == ratings.by_row.indices()[[5, 100]].tolist()
    assert value.tolist() == ratings.by_row.values()[[5, 100]].tolist()
    with pytest.raises(RuntimeError, match=r"use Ratings\.to"):
        ratings.by_row.to("cpu")


@settings(max_examples=40)
@given(st.data())
def test_chunks_and_selections_cover_the_groups(data):
    n, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    count = data.draw(st.integers(1, n * m))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    ratings = Ratings(*some_entries(rng, n, m, count, "codes"), shape=(n, m))
    side = ratings.by_column
    limit = data.draw(st.integers(1, 20))
    runs = list(side.chunks(limit))
    assert [run[0] for run in runs] == [0] + [run[1] for run in runs[:-1]]
    assert runs[-1][1] == m
    assert all(stop - start <= limit or last - first == 1 for first, last, start, stop in runs)
    for first, last, start, stop in runs:
        assert side.offsets[first] == start
        assert side.offsets[last] == stop
        assert side.groups(start, stop).tolist() == side.groups()[start:stop].tolist()
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, m - 1), max_size=5)), dtype=torch.int64)
    positions, offsets = side.select(chosen)
    for k, group in enumerate(chosen.tolist()):
        expected = list(range(int(side.offsets[group]), int(side.offsets[group + 1])))
        assert positions[offsets[k] : offsets[k + 1]].tolist() == expected


def test_ids_above_16_bits_are_sorted():
    rng = np.random.default_rng(2)
    rows, columns = rng.choice(200_000, 500, replace=False), rng.choice(200_000, 500, replace=False)
    ratings = Ratings(rows, columns, np.arange(500.0), dtype=torch.float32)
    got = {(r, c): v for r, c, v in zip(*(t.tolist() for t in ratings.entries()), strict=True)}
    assert got == {(r, c): v for r, c, v in zip(rows.tolist(), columns.tolist(), range(500), strict=True)}
    assert bool((ratings.by_column.groups().diff() >= 0).all())


@pytest.mark.parametrize(("rule", "value"), [("mean", 3.0), ("last", 5.0), ("sum", 9.0)])
def test_duplicates_follow_the_named_rule(rule, value):
    ratings = Ratings([1, 0, 1, 1], [1, 1, 1, 1], [1.0, 7.0, 3.0, 5.0], duplicates=rule)
    assert ratings.n_duplicates == 2
    assert ratings.by_column.values().tolist() == [7.0, value]


def test_the_same_row_in_neighbouring_columns_is_no_duplicate():
    assert Ratings([0, 0], [0, 1], [1.0, 2.0]).n_duplicates == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (([0, 0], [1, 1], [1.0, 2.0]), ValueError, "1 entry repeats a pair.*row 0, column 1.*duplicates='mean'"),
        (([0, -1], [1, 1], [1.0, 2.0]), ValueError, "rows must lie between 0 and .*from -1 to 0"),
        (([0, 2**40], [1, 1], [1.0, 2.0]), ValueError, f"rows must lie between .* to {2**40}"),
        (([0.5, 1], [1, 1], [1.0, 2.0]), TypeError, "rows must hold whole numbers, got dtype float64"),
        (([0, 1], [1, 1], [1.0, float("nan")]), ValueError, "values must be finite, got 1 NaN or infinite among 2"),
        (([0, 1], [1, 1], ["a", "b"]), TypeError, "values must be numbers, got dtype <U1"),
        (([0, 1], [1, 1], [1.0]), ValueError, "must have one length"),
        (([[0]], [1], [1.0]), ValueError, r"rows must have one dimension, got shape \(1, 1\)"),
        (([], [], []), (TypeError, ValueError), "rows must hold whole numbers|between 1 and"),
    ],
)
def test_bad_entries_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        Ratings(*arguments)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"shape must be at least \(2, 3\).*got \(2, 2\)"):
        Ratings([1], [2], [1.0], shape=(2, 2))
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64, got torch.float16"):
        Ratings([1], [2], [1.0], dtype=torch.float16)
    with pytest.raises(ValueError, match="duplicates must be 'error', 'mean', 'last' or 'sum', got 'first'"):
        Ratings([1], [2], [1.0], duplicates="first")
    with pytest.raises(ValueError, match="between 1 and 2147483647 ratings, got 0"):
        Ratings(np.zeros(0, int), np.zeros(0, int), np.zeros(0))


@pytest.mark.parametrize("method", ["auto", "bag", "split", "csr", "dense"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_segment_sum_equals_the_loop(method, weighted, dtype):
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 7, 8], dtype=torch.int32)
    indices = torch.randint(6, (8,), dtype=torch.int32)
    if not weighted:
        indices = torch.tensor([0, 2, 5, 1, 2, 3, 4, 0], dtype=torch.int32)
    table = torch.randn(6, 4, dtype=dtype)
    weights = torch.randn(8, dtype=dtype) if weighted else None
    factors = torch.ones(8, dtype=dtype) if weights is None else weights
    expected = torch.stack(
        [
            sum(
                (factors[k] * table[indices[k]] for k in range(offsets[g], offsets[g + 1])), torch.zeros(4, dtype=dtype)
            )
            for g in range(4)
        ]
    )
    torch.testing.assert_close(bag_sum(table, indices, offsets, weights, method=method), expected)


@pytest.mark.parametrize("width", [3, 8, 11, 12])
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_products_of_any_width(width, weighted):
    """Tables that are read often are widened to whole vectors; sums keep their width."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(5, (60,), generator=generator, dtype=torch.int32)
    offsets = torch.tensor([0, 0, 25, 60], dtype=torch.int32)
    weights = torch.randn(60, generator=generator, dtype=torch.float64) if weighted else None
    table = torch.randn(5, width, generator=generator, dtype=torch.float64)
    gathered = table[indices] if weights is None else weights[:, None] * table[indices]
    expected = torch.stack([gathered[:0].sum(0), gathered[:25].sum(0), gathered[25:].sum(0)])
    torch.testing.assert_close(bag_sum(table, indices, offsets, weights, method="csr"), expected)


@pytest.mark.parametrize("most", [3, 10**6])
def test_unweighted_sparse_products_beyond_the_kept_ones(most, monkeypatch):
    monkeypatch.setattr("fisherfold.completion.segments._MOST_ONES", most)
    segments._kept_ones.cache_clear()
    offsets, table = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    sums = bag_sum(table, torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32), offsets, method="csr")
    segments._kept_ones.cache_clear()
    assert sums.flatten().tolist() == [3.0, 5.0]


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match=r"method must be one of .*'bag'.*got 'gpu'"):
        bag_sum(
            torch.ones(1, 1), torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), method="gpu"
        )


@pytest.mark.parametrize("weighted", [False, True])
def test_long_groups_are_summed_in_pieces(weighted):
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor([0, 600, 256, 0, 1, 257, 0], dtype=torch.int32)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    indices = torch.randint(50, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
    table = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(len(indices), generator=generator, dtype=torch.float64) if weighted else None
    whole = bag_sum(table, indices, offsets, weights, method="bag")
    torch.testing.assert_close(bag_sum(table, indices, offsets, weights, method="split"), whole)
