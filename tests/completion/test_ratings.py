"""The container holds every entry once by row and once by column, and sums over either order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherfold.completion import grouped
from fisherfold.completion.ratings import Ratings


def dense(ratings, by_row):
    """The matrix with NaN at holes, read from one of the two orders."""
    side = ratings.by_row if by_row else ratings.by_column
    matrix = torch.full(
        ratings.shape if by_row else ratings.shape[::-1], float("nan"), dtype=ratings.dtype
    )
    matrix[side.groups().long(), side.indices().long()] = side.values()
    return matrix if by_row else matrix.T


def some_entries(rng, n, m, count):
    flat = rng.choice(n * m, size=count, replace=False)
    return flat // m, flat % m, rng.standard_normal(count)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 16), (torch.float64, 24)])
def test_both_orders_hold_the_matrix(dtype, limit):
    rng = np.random.default_rng(0)
    rows, columns, values = some_entries(rng, 300, 400, 80_000)
    ratings = Ratings(rows, columns, values, shape=(301, 400), dtype=dtype)
    expected = torch.full((301, 400), float("nan"), dtype=dtype)
    expected[rows, columns] = torch.as_tensor(values, dtype=dtype)
    for by_row in (True, False):
        torch.testing.assert_close(dense(ratings, by_row), expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(
            dense(ratings.T, by_row), expected.T, rtol=0, atol=0, equal_nan=True
        )
    assert ratings.nbytes == limit * ratings.n_ratings + 4 * (sum(ratings.shape) + 2)
    assert ratings.dtype == dtype
    assert ratings.row_counts.sum() == 80_000
    assert ratings.mean == pytest.approx(values.mean(), abs=1e-6)


@settings(max_examples=40)
@given(st.data())
def test_ranges_and_selections_follow_the_groups(data):
    n, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    count = data.draw(st.integers(1, n * m))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    side = Ratings(*some_entries(rng, n, m, count), shape=(n, m)).by_column
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
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
    assert got == {
        (r, c): v for r, c, v in zip(rows.tolist(), columns.tolist(), range(500), strict=True)
    }
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
        (
            ([0, 0], [1, 1], [1.0, 2.0]),
            ValueError,
            "1 entry repeats a pair.*row 0, column 1.*duplicates='mean'",
        ),
        (([0, -1], [1, 1], [1.0, 2.0]), ValueError, "rows must lie between 0 and .*from -1 to 0"),
        (([0, 2**40], [1, 1], [1.0, 2.0]), ValueError, f"rows must lie between .* to {2**40}"),
        (
            ([0.5, 1], [1, 1], [1.0, 2.0]),
            TypeError,
            "rows must hold whole numbers, got dtype float64",
        ),
        (
            ([0, 1], [1, 1], [1.0, float("nan")]),
            ValueError,
            "values must be finite, got 1 NaN or infinite among 2",
        ),
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
    with pytest.raises(
        ValueError, match=r"dtype must be torch.float32 or torch.float64, got torch.float16"
    ):
        Ratings([1], [2], [1.0], dtype=torch.float16)
    with pytest.raises(
        ValueError, match="duplicates must be 'error', 'mean', 'last' or 'sum', got 'first'"
    ):
        Ratings([1], [2], [1.0], duplicates="first")
    with pytest.raises(ValueError, match="between 1 and 2147483647 ratings, got 0"):
        Ratings(np.zeros(0, int), np.zeros(0, int), np.zeros(0))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernel", ["bag_sum", "_sum_in_pieces", "_sparse_sum", "_embedding_sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kernel_sums_the_groups(kernel, weighted, dtype):
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor([0, 600, 256, 0, 1, 257, 0], dtype=torch.int32)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    indices = torch.randint(50, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
    table = torch.randn(50, 3, generator=generator, dtype=dtype)
    weights = torch.randn(len(indices), generator=generator, dtype=dtype) if weighted else None
    gathered = table[indices] if weights is None else weights[:, None] * table[indices]
    expected = torch.stack([part.sum(0) for part in gathered.split(counts.tolist())])
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    found = getattr(grouped, kernel)(table, indices, offsets, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_sums_of_powers_over_a_run_of_groups():
    ratings = Ratings([0, 0, 1, 3], [0, 2, 2, 1], [2.0, 3.0, 5.0, 7.0], shape=(4, 3))
    table = torch.arange(3.0, dtype=torch.float64)[:, None]
    plain, weighted, squares = ratings.by_row.sums({0: table, 1: table, 2: table}, 1, 4)
    found = [part[:, 0].tolist() for part in (plain, weighted, squares)]
    assert found == [[2, 0, 1], [10, 0, 7], [50, 0, 49]]
    assert ratings.by_row.take(torch.tensor([2])).sums({0: table})[0].tolist() == [[0.0]]
