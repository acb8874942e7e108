"""Ids are what they are: none is merged with another, and they come back from files equal and of the same type."""

import datetime
import json
import sys
import uuid
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fisherfold import MatrixCompletion, SubspaceClassifier, SubspaceRegressor
from fisherfold.cli import app
from fisherfold.tables.id_files import from_json, pack_ids, to_json, unpack_ids
from fisherfold.tables.ids import IdIndex, id_array, objects
from fisherfold.tables.lookalikes import lookalikes

BIG = 2**53
MIDNIGHT = datetime.datetime(2020, 2, 1)
DIFFERENT = {
    "beyond 2**53": [BIG, BIG + 1, BIG + 2],
    "beyond 2**63": [2**63, 2**63 + 1, 2**64 - 1],
    "beyond 64 bits": [2**64, 2**64 + 1, -(2**70)],
    "of both signs, beyond 2**63": [2**63, -1, 5],
    "large beside a float": [BIG, BIG + 1, 0.5],
    "negative": [-BIG - 1, -BIG, -1],
    "a number and its text": [1, "1", "1.0"],
    "tuples": [("a", 1), ("a", "1"), ("b", (2, 3))],
    "tuples of different lengths": [("a",), ("a", 1), ()],
    "bytes": [b"a", b"a\0", "a"],
    "with NUL at the end": ["a", "a\0", "a\0\0"],
    "composed and decomposed": ["\u00e9", "e\u0301", "e"],
    "lone surrogates": ["\ud800", "\ud801", "?"],
    "long": ["x" * 100_000, "x" * 100_000 + "y", "x"],
    "dates": [datetime.date(2020, 2, 1), MIDNIGHT, "2020-02-01"],
    "times with a zone and without": [MIDNIGHT, MIDNIGHT.replace(tzinfo=datetime.timezone.utc), 0],
    "decimals": [Decimal("0.1"), 0.1, "0.1"],
    "UUIDs": [uuid.UUID(int=1), uuid.UUID(int=2), str(uuid.UUID(int=1))],
    "empty text": ["", " ", "\0"],
}  # fmt: skip
each_kind = pytest.mark.parametrize("ids", DIFFERENT.values(), ids=DIFFERENT.keys())


def table(ids):
    """Row k of three has the values k, k + 10, k + 20, ..., so that every prediction tells its row."""
    pairs = [(i, c) for i in ids for c in "abcd"]
    return pairs, np.arange(len(pairs), dtype=float)


def same(a, b):
    return [(type(x), x) for x in a] == [(type(x), x) for x in b]


@each_kind
def test_completion_keeps_ids_apart(ids, tmp_path):
    pairs, values = table(ids)
    model = MatrixCompletion(1, offsets="rows", dtype="float64", max_iter=5).fit(pairs, values)
    numbered = MatrixCompletion(1, offsets="rows", dtype="float64", max_iter=5).fit(
        np.argwhere(np.ones((len(ids), 4))), values
    )
    means, expected = (m.predict(X).reshape(len(ids), 4).mean(1) for m, X in (
        (model, pairs), (numbered, np.argwhere(np.ones((len(ids), 4))))))  # fmt: skip
    np.testing.assert_allclose(means, expected, atol=1e-3)
    assert set(model.model_.row_ids.labels.tolist()) == set(ids)
    model.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model")
    assert same(again.model_.row_ids.labels.tolist(), model.model_.row_ids.labels.tolist())
    assert np.array_equal(again.predict(pairs), model.predict(pairs))
    for k, name in enumerate(ids):
        assert list(again.recommend(name, exclude_seen=False)[1]) == list(model.recommend(name, exclude_seen=False)[1])
        assert model.model_.row_ids.numbers([name])[0] == model.model_.row_ids.numbers(objects(ids))[k]


@each_kind
def test_a_stream_keeps_ids_apart(ids, tmp_path):
    first = MatrixCompletion(1).fit([(7, "a"), (8, "b"), (7, "b")], [1.0, 2.0, 3.0])
    grown = first.partial_fit(*table(ids))
    assert len(grown.model_.row_ids) == 2 + len(ids)
    grown.save(tmp_path / "model")
    again = MatrixCompletion.load(tmp_path / "model").partial_fit([(ids[0], "a")], [1.0])
    assert len(again.model_.row_ids) == 2 + len(ids)
    assert same(again.model_.row_ids.labels.tolist(), grown.model_.row_ids.labels.tolist())


@each_kind
def test_tasks_are_kept_apart(ids, tmp_path):
    rng = np.random.default_rng(0)
    X, numbers = rng.normal(size=(60, 2)), np.arange(60) % len(ids)
    y = X[:, 0] + 5.0 * numbers
    task = [ids[k] for k in numbers]
    model = SubspaceRegressor(1, max_iter=3).fit(X, y, task=task)
    assert set(model.task_ids_.tolist()) == set(ids)
    lists = SubspaceRegressor(1, max_iter=1).fit([X[numbers == k] for k in range(len(ids))],
                                     [y[numbers == k] for k in range(len(ids))], task=ids)  # fmt: skip
    assert set(lists.task_ids_.tolist()) == set(ids)
    model.fold_in(X[:4], y[:4], task=[("new", 1), "new", ("new", 1), "new"])
    model.save(tmp_path / "model")
    again = SubspaceRegressor.load(tmp_path / "model")
    assert same(again.task_ids_.tolist(), model.task_ids_.tolist())
    assert np.array_equal(again.predict(X, task=task), model.predict(X, task=task))
    assert len(again.partial_fit(X[:2], y[:2], task=task[:2]).task_ids_) == len(ids) + 2
    labels = (X[:, 0] > 0).astype(int)
    classifier = SubspaceClassifier(1, ridge=1.0, max_iter=1).fit(X, labels, task=task)
    classifier.save(tmp_path / "classifier")
    assert same(SubspaceClassifier.load(tmp_path / "classifier").task_ids_.tolist(), classifier.task_ids_.tolist())


def test_equal_ids_are_one_whatever_their_type():
    """Python's own rule: what is equal is one."""
    for one in ([1, 1.0, True, np.int64(1), np.uint8(1), np.float32(1), torch.tensor(1)],
                ["a", np.str_("a")], [b"a", np.bytes_(b"a")], [("a", 1), ("a", np.int16(1))],
                [datetime.date(2020, 2, 1), np.datetime64("2020-02-01")],
                [MIDNIGHT, pd.Timestamp("2020-02-01"), np.datetime64("2020-02-01", "ns")]):  # fmt: skip
        index = IdIndex(id_array([*one, "other"], "row"))
        assert len(index) == 2
        for value in one:
            assert index.numbers([value]).tolist() == [0]
            alone = IdIndex(id_array([value], "row"))
            assert alone.numbers(one).tolist() == [0] * len(one)


def test_numeric_lookups_are_exact_across_dtypes():
    signed = IdIndex(np.array([BIG, BIG + 1, -1]))
    unsigned = IdIndex(np.array([BIG, BIG + 1, 2**64 - 1], dtype=np.uint64))
    assert signed.numbers(np.array([BIG + 1, 2**64 - 1], dtype=np.uint64)).tolist() == [2, -1]
    assert unsigned.numbers(np.array([BIG + 1, -1])).tolist() == [1, -1]
    for index in (signed, unsigned):
        n = len(index)
        index.add(np.array([0.5, 2.0]))
        index.add(np.array([BIG + 1, BIG + 3], dtype=np.uint64))
        assert len(index) == n + 3
        assert index.numbers(np.array([BIG + 3, BIG + 2, 2])).tolist() == [n + 2, -1, n + 1]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (["a", None], ValueError, "row id at position 1 is missing .got None"),
        ([1.0, float("nan")], ValueError, "row id at position 1 is missing .got nan"),
        (["a", float("nan")], ValueError, "row id at position 1 is missing"),
        (["a", pd.NA], ValueError, "row id at position 1 is missing .got <NA>"),
        ([pd.Timestamp("2020"), pd.NaT], ValueError, "row id at position 1 is missing .got NaT"),
        (np.array(["2020", "NaT"], dtype="M8[D]"), ValueError, "row id at position 1 is missing"),
        ([("a", 1), ("a", None)], ValueError, r"row id at position 1 is missing .got \('a', None\)"),
        (["a", float("inf")], ValueError, "row id at position 1 is infinite"),
        ([1.5, 2.0**53], ValueError, r"position 1 is the float 9007199254740992.0: from 2\*\*53 on several whole"),
        (np.array([1.0, 1e300]), ValueError, r"position 1 is the float 1e\+300"),
        (["a", [1]], TypeError, "row ids must be hashable, got list at position 1"),
        ("abc", TypeError, r"row ids must be a sequence, got 'abc' \(str\)"),
        (5, TypeError, r"row ids must be a sequence, got 5 \(int\)"),
        (np.zeros((2, 2)), ValueError, r"row ids must have one dimension, got shape \(2, 2\)"),
    ],
)
def test_what_is_no_id_is_named(ids, error, message):
    with pytest.raises(error, match=message):
        id_array(ids, "row")


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pd.Series(["b", "a", "b"], dtype="category"), ["b", "a"]),
        (pl.Series(["b", "a", "b"], dtype=pl.Categorical), ["b", "a"]),
        (pl.Series(["b", "a", "b"], dtype=pl.Enum(["a", "b"])), ["b", "a"]),
        (pd.Series([BIG + 1, BIG, BIG + 1], dtype="Int64"), [BIG, BIG + 1]),
        (pl.Series([2**64 - 1, 2**64 - 2, 0], dtype=pl.UInt64), [0, 2**64 - 2, 2**64 - 1]),
        (pl.Series([b"a\0", b"a", b"a"]), [b"a\0", b"a"]),
        (pl.Series([datetime.date(2020, 2, 1)] * 3), [datetime.date(2020, 2, 1)]),
    ],
)
def test_columns_of_data_frames(column, expected):
    library = pd if isinstance(column, pd.Series) else pl
    frame = library.DataFrame({"r": column, "c": ["x", "y", "z"], "v": [1.0, 2.0, 3.0]})
    model = MatrixCompletion(1).fit(frame)
    assert model.model_.row_ids.labels.tolist() == expected


def test_a_missing_id_in_a_long_frame_is_named_as_such():
    for frame in (pd.DataFrame({"r": ["a", None], "c": ["x", "y"], "v": [1.0, 2.0]}),
                  pl.DataFrame({"r": ["a", None], "c": ["x", "y"], "v": [1.0, 2.0]})):  # fmt: skip
        with pytest.raises(ValueError, match="row id at position 1 is missing"):
            MatrixCompletion(1).fit(frame)


def test_columns_of_a_wide_frame_may_be_tuples():
    frame = pd.DataFrame(np.arange(6.0).reshape(3, 2), columns=pd.MultiIndex.from_tuples([("a", 1), ("a", 2)]))
    assert MatrixCompletion(1).fit(frame).model_.column_ids.labels.tolist() == [("a", 1), ("a", 2)]


def test_lines_of_different_lengths_are_named():
    with pytest.raises(ValueError, match=r"got 3 entries in line 1: \('b', 2, 3\)"):
        MatrixCompletion(1).fit([("a", 1), ("b", 2, 3)], [1.0, 2.0])


def test_ids_of_another_type_than_in_the_fit():
    model = MatrixCompletion(1).fit([(("a", 1), 0), (("b", 2), 1)], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"another type: got 'a' \(str\), fitted with \('a', 1\) \(tuple\)"):
        model.predict([("a", 0)])


_plain_ids = st.recursive(
    st.one_of(
        st.integers(), st.booleans(), st.text(), st.binary(), st.floats(-(2.0**53) + 1, 2.0**53 - 1), st.dates(),
        st.datetimes(), st.uuids(), st.decimals(allow_nan=False, allow_infinity=False), st.times(), st.timedeltas(),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4,
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(_plain_ids, max_size=8))
def test_files_keep_any_ids(ids):
    labels = objects(list(dict.fromkeys(ids)))
    kind, parts = pack_ids(labels, "rows")
    found = unpack_ids({f"rows.ids.{key}": part for key, part in parts.items()}, "rows", kind)
    assert same(found.tolist(), labels.tolist())
    assert IdIndex.restore(found).numbers(labels).tolist() == list(range(len(labels)))
    assert all(from_json(json.loads(json.dumps(to_json(label, "rows")))) == label for label in labels.tolist())


@pytest.mark.parametrize("stored", [None, [], {"tuple": 1}, {"pickle": "x"}, {"date": "x"}, {"date": 1}, float("inf")])
def test_files_are_not_believed(stored):
    with pytest.raises(ValueError, match=r"an id is|Invalid isoformat"):
        from_json(stored)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"timedelta": "1.5"}, "invalid literal"),
        ({"timedelta": "9" * 30}, "too large"),
        ({"time": "25:00"}, "must be in|Invalid isoformat"),
        ({"datetime64": "7"}, "not enough values"),
        ({"datetime64": "7 1parsec"}, "Invalid datetime unit"),
        ({"timedelta64": f"{-(2**63)} 1ns"}, "a time is expected"),
        ({"period": "600 sometimes"}, "Invalid frequency"),
        ({"period": "M"}, "not enough values"),
    ],
)
def test_times_of_files_are_not_believed(stored, message):
    with pytest.raises((ValueError, TypeError, OverflowError), match=message):
        from_json(stored)


SPAN = np.arange(4)
TIMES = {
    "timedelta": pd.Series(pd.to_timedelta(SPAN, unit="D")),
    "nanoseconds": pd.Series(pd.to_timedelta(SPAN, unit="ns")),
    "list of timedeltas": [pd.Timedelta(k, "h") for k in SPAN],
    "list of nanoseconds": [pd.Timedelta(k, "ns") for k in SPAN],
    "list of timestamps": [pd.Timestamp(k) for k in SPAN],
    "months": SPAN.astype("m8[M]"),
    "steps of 25 ps": SPAN.astype("m8[25ps]"),
    "times to the nanosecond": np.datetime64("2020-02-01", "ns") + SPAN.astype("m8[ns]"),
    "far years": np.array([f"{30000 + k}" for k in SPAN], dtype="M8[Y]"),
    "of Python": [datetime.timedelta(days=int(k)) for k in SPAN],
    "of a clock": [datetime.time(int(k), 30) for k in SPAN],
    "periods of months": pd.Series(pd.period_range("2020-01", periods=4, freq="M")),
    "periods of weeks": pd.Series(pd.period_range("2020-01", periods=4, freq="W-WED")),
    "periods in tuples": [("a", pd.Period("2020Q1", "Q") + int(k)) for k in SPAN],
}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES.keys())
def test_times_and_periods_are_kept_in_model_files(tmp_path, times):
    """Equal, of the same type, and found by the ids that they were made of."""
    rows = id_array(times, "row")
    assert len(set(rows.tolist())) == 4
    assert not any(isinstance(label, int) for label in rows.tolist())
    pairs = list(zip(np.repeat(objects(rows.tolist()), 2), [0, 1] * 4, strict=True))
    values = np.arange(8.0)
    model = MatrixCompletion(1).fit(pairs, values)
    model.save(tmp_path / "m")
    again = MatrixCompletion.load(tmp_path / "m")
    assert same(again.model_.row_ids.labels.tolist(), model.model_.row_ids.labels.tolist())
    assert again.model_.row_ids.numbers(times).tolist() == [0, 1, 2, 3]
    assert again.predict(pairs).tolist() == model.predict(pairs).tolist()
    rng = np.random.default_rng(0)
    X, y, task = rng.normal(size=(40, 2)), rng.normal(size=40), objects(list(rows.tolist()) * 10)
    tasks = SubspaceRegressor(1).fit(X, y, task=task)
    tasks.save(tmp_path / "t")
    assert SubspaceRegressor.load(tmp_path / "t").predict(X, task=task).tolist() == tasks.predict(X, task=task).tolist()


def test_a_file_with_periods_says_that_it_needs_pandas(monkeypatch):
    stored = to_json(pd.Period("2020-01", "M"), "rows")
    assert stored == {"period": "600 M"}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match="ids of this file are periods of pandas, which is not installed"):
        from_json(stored)


def test_ids_that_no_file_can_hold_are_named_by_their_type(tmp_path):
    model = MatrixCompletion(1).fit([(pd.Interval(0, 1), 0), (pd.Interval(1, 2), 1)], [1.0, 2.0])
    with pytest.raises(TypeError, match=r"ids of rows can be saved if they are .*, got Interval\(0, 1.*\(Interval\)"):
        model.save(tmp_path / "m")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("start", [BIG, 2**63])
def test_the_command_line_keeps_large_ids_apart(tmp_path, suffix, start):
    ids = [start, start + 1, start + 2]
    pairs, values = table(ids)
    kind = pl.Int64 if start < 2**63 else pl.UInt64
    frame = pl.DataFrame({"u": pl.Series([u for u, _ in pairs], dtype=kind), "i": [i for _, i in pairs], "r": values})
    path, model = tmp_path / f"ratings.{suffix}", tmp_path / "model"
    getattr(frame, f"write_{suffix}")(path)
    run = CliRunner().invoke(app, ["complete", "fit", str(path), "-o", str(model), "--rank", "1", "--json"])
    assert json.loads(run.stdout)["rows"] == 3
    found = []
    for name, write in (("pairs.csv", "write_csv"), ("pairs.parquet", "write_parquet")):
        getattr(frame.select("u", "i"), write)(tmp_path / name)
        out = tmp_path / "out.csv"
        words = ["complete", "predict", str(model), str(tmp_path / name), "-o", str(out), "--json"]
        run = CliRunner().invoke(app, words)
        assert json.loads(run.stdout)["with ids not seen in the fit"] == 0
        found.append(pl.read_csv(out, columns=["prediction"])["prediction"].to_list())
    assert found[0] == found[1] == MatrixCompletion.load(model).predict(pl.read_parquet(tmp_path / "pairs.parquet")
        if suffix == "parquet" else [(str(u) if start >= 2**63 else u, i) for u, i in pairs]).tolist()  # fmt: skip
    run = CliRunner().invoke(app, ["complete", "recommend", str(model), str(start + 1), "--include-seen", "--json"])
    assert "was not in the fit" not in run.stderr
    assert list(json.loads(run.stdout)) == [str(start + 1)]


def test_texts_of_thousands_of_digits_are_ids_like_any_other():
    known = IdIndex(id_array(["9" * 5000, "1"], "row"))
    assert lookalikes(known, id_array(["8" * 5000, "0" * 5000 + "1", "01"], "row")) == {"01": "1"}
