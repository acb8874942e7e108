"""Tables from files: formats, headers, columns by name and position, and the account of what was refused."""

from __future__ import annotations

import datetime

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fisherfold.completion.entries import Entries
from fisherfold.completion.estimator import MatrixCompletion
from fisherfold.distributed import ALONE
from fisherfold.tables.file_shares import FileShare, RatingShare
from fisherfold.tables.table_columns import index_of
from fisherfold.tables.table_files import read_table
from fisherfold.tables.tables import read_pairs, read_ratings

LINES = [("1", "10", "5"), ("2", "10", "3.5"), ("2", "11", "1")]


def write(path, separator, header=None, lines=LINES):
    rows = ([header] if header else []) + list(lines)
    path.write_text("\n".join(separator.join(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ","), ("a.tsv", "\t"), ("a.dat", "::"), ("a.txt", ";"), ("a.data", "\t")]
)
@pytest.mark.parametrize("header", [None, ("user", "item", "rating")])
def test_formats_and_headers(tmp_path, name, separator, header):
    table = read_ratings(write(tmp_path / name, separator, header))
    assert table.rows.tolist() == [1, 2, 2]
    assert table.columns.tolist() == [10, 10, 11]
    assert table.values.tolist() == [5.0, 3.5, 1.0]
    assert (table.n_read, sum(table.refused.values())) == (3, 0)


def test_quoted_semicolons_are_not_taken_for_separators(tmp_path):
    quoted = write(tmp_path / "b.csv", ",", lines=[('"a;b;c"', '"x;y;z"', r) for _, _, r in LINES])
    assert read_ratings(quoted).rows.tolist() == ["a;b;c"] * 3


def test_a_column_has_one_role(tmp_path):
    path = write(tmp_path / "a.csv", ",")
    for columns in (("1", "1", "3"), ("1", "3", "3")):
        with pytest.raises(ValueError, match="name a column twice, row, column, value are different ones"):
            read_ratings(path, columns=columns)
    with pytest.raises(ValueError, match="1, 1 name a column twice"):
        read_pairs(path, text=(True, True), columns=("1", "1"))


def test_parquet(tmp_path):
    frame = pl.DataFrame({"u": ["a", "b"], "i": [7, 8], "r": [1.5, 2.5]})
    frame.write_parquet(tmp_path / "a.parquet")
    table = read_ratings(tmp_path / "a.parquet")
    assert table.rows.tolist() == ["a", "b"]
    assert table.columns.tolist() == [7, 8]
    assert table.values.tolist() == [1.5, 2.5]


def test_floats_of_a_parquet_file_are_the_ids_they_are_in_memory(tmp_path):
    # a column of whole numbers with holes is one of floats in pandas
    users = [1.0, 2.0, float("nan"), None, 2.0**52 + 1, float("inf")]
    pl.DataFrame({"u": users, "i": [1.5, 2, 3, 4, 5, 6], "r": [1.0] * 6}).write_parquet(tmp_path / "a.parquet")
    table = read_ratings(tmp_path / "a.parquet")
    assert table.rows.tolist() == [1, 2, 2**52 + 1]
    assert table.columns.tolist() == ["1.5", "2", "5"]
    assert table.refused == {"missing id": 3}
    with pytest.raises(ValueError, match="the id in column 'u' is missing in data line 3"):
        read_pairs(tmp_path / "a.parquet", text=(False, False))


@pytest.mark.parametrize("name", ["a.PARQUET", "a.pq", "a.data"])
def test_a_parquet_file_is_known_by_its_name_or_its_content_whole_or_in_shares(tmp_path, name):
    pl.DataFrame({"u": ["a", "b"], "i": [7, 8], "r": [1.5, 2.5]}).write_parquet(tmp_path / name)
    assert read_ratings(tmp_path / name).values.tolist() == [1.5, 2.5]
    share = RatingShare(FileShare(tmp_path / name, ALONE), ALONE)
    assert [batch.values.tolist() for batch in share.batches()] == [[1.5, 2.5]]


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["1", "4,5", "5", "b", "a"])])
def test_categories_of_a_parquet_file_are_the_text_that_they_are(tmp_path, kind):
    path, words = tmp_path / "a.parquet", pl.DataFrame({"u": ["b", "a", "b"], "i": [1, 2, 3], "r": ["5", "4,5", "1"]})
    words.with_columns(pl.col("u", "r").cast(kind)).write_parquet(path)
    table = read_ratings(path)
    assert (table.rows.tolist(), table.values.tolist(), table.decimal) == (["b", "a", "b"], [5.0, 4.5, 1.0], ",")
    share = RatingShare(FileShare(path, ALONE), ALONE)
    assert [batch.values.tolist() for batch in share.batches()] == [[5.0, 4.5, 1.0]]


@pytest.mark.parametrize("kind", ["Int8", "UInt8", "Int16", "Int32", "UInt32", "Int64", "UInt64", "Int128"])
def test_whole_numbers_of_every_size_are_the_ids_they_are_in_memory(tmp_path, kind):
    low, high = (0, 200) if kind.startswith("U") else (-100, 100)
    users, items = np.arange(low, high), np.arange(200) % 7
    dtype = getattr(pl, kind)
    lines = {"u": pl.Series(users, dtype=dtype), "i": pl.Series(items, dtype=dtype), "r": users % 11 + items / 7}
    pl.DataFrame(lines).write_parquet(tmp_path / "a.parquet")
    table = read_ratings(tmp_path / "a.parquet")
    found = Entries(table.rows, table.columns, table.values)
    model = MatrixCompletion(rank=1, max_iter=2).fit_entries(found)
    pairs = np.column_stack([[*users, users[-1] + 256], [*items, 0]])
    in_memory = MatrixCompletion(rank=1, max_iter=2).fit(pairs[:-1], table.values).predict(pairs)
    model.save(tmp_path / "model")
    for each in (model, MatrixCompletion.load(tmp_path / "model")):
        assert np.array_equal(each.predict(pairs), in_memory)  # the last row is none of theirs, in 8 bits either
    _, rows, _ = read_pairs(tmp_path / "a.parquet", text=(False, False))
    assert rows.tolist() == users.tolist()


def test_whole_numbers_beyond_64_bits_are_text(tmp_path):
    users = pl.Series([2**70, 1], dtype=pl.Int128)
    pl.DataFrame({"u": users, "i": [1, 2], "r": [1.0, 2.0]}).write_parquet(tmp_path / "a.parquet")
    assert read_ratings(tmp_path / "a.parquet").rows.tolist() == [str(2**70), "1"]


def test_dates_are_no_numbers(tmp_path):
    day = datetime.date(2020, 1, 1)
    for name, value in {"date": day, "time": datetime.datetime(2020, 1, 1), "span": datetime.timedelta(1)}.items():
        path = tmp_path / f"{name}.parquet"
        pl.DataFrame({"u": [1, 2], "i": [day, day], name: [value] * 2, "r": [1.0, 2.0]}).write_parquet(path)
        with pytest.raises(ValueError, match=f"column '{name}' holds D.*, numbers are expected"):
            read_ratings(path)
        assert read_ratings(path, columns=("u", "i", "r")).columns.tolist() == ["2020-01-01"] * 2


def test_the_index_of_a_data_frame_is_not_taken_for_ids(tmp_path):
    # as DataFrame.to_csv writes it
    path = write(tmp_path / "a.csv", ",", ("", "user", "item", "rating"), [("0", *LINES[0]), ("1", *LINES[1])])
    with pytest.raises(ValueError, match=r"the first column has no name, .* as in --columns user,item,rating"):
        read_ratings(path)
    assert read_ratings(path, columns=("user", "item", "rating")).rows.tolist() == [1, 2]
    with pytest.raises(ValueError, match="as in --columns user,item"):
        read_pairs(path, text=(False, False))
    assert read_ratings(write(tmp_path / "b.csv", ",", ("", "item", "rating"))).rows.tolist() == [1, 2, 2]
    numbered = [(*line, "0") for line in LINES]
    named = write(tmp_path / "c.csv", ",", ("column_1", "column_2", "column_3", "column_4"), numbered)
    assert read_ratings(named).rows.tolist() == [1, 2, 2]


@pytest.mark.parametrize("name", ["index", "Unnamed: 0", "level_0", "__index_level_0__"])
def test_an_index_that_has_become_a_column_is_not_taken_for_ids(tmp_path, name):
    path = write(tmp_path / "a.csv", ",", (name, "user", "item", "rating"), [("0", *LINES[0]), ("1", *LINES[1])])
    with pytest.raises(ValueError, match=rf"the first column is '{name}', .* as in --columns user,item,rating"):
        read_ratings(path)
    assert read_ratings(write(tmp_path / "b.csv", ",", (name, "item", "rating"))).rows.tolist() == [1, 2, 2]


def indexed(path, index, names=("user", "item", "rating")):
    """A Parquet file as pandas writes it, its index behind its columns."""
    frame = pd.DataFrame(dict(zip(names, ([7, 8, 8], [1, 1, 2], [5.0, 3.5, 1.0], [0, 0, 0]), strict=False)))
    frame.set_index(index).to_parquet(path)
    return path


@pytest.mark.parametrize("index", [["user", "item"], "user", ["user", "item", "rating"]])
def test_ids_in_the_index_of_a_parquet_file_are_ids(tmp_path, index):
    path = indexed(tmp_path / "a.parquet", index)
    if index != ["user", "item", "rating"]:
        assert pl.read_parquet(path).columns != ["user", "item", "rating"]
    table = read_ratings(path)
    assert table.names == ["user", "item", "rating"]
    assert (table.rows.tolist(), table.columns.tolist(), table.values.tolist()) == ([7, 8, 8], [1, 1, 2], [5, 3.5, 1])
    assert RatingShare(FileShare(path, ALONE), ALONE).names == table.names
    # positions and names mean the columns of the file
    first = pl.read_parquet(path).columns[0]
    assert read_ratings(path, columns=("1", *(n for n in table.names if n != first))).names[0] == first


def test_levels_of_an_index_without_names_are_ids_where_there_are_two(tmp_path):
    """As ``wide.stack().to_frame("rating")`` writes them."""
    stacked = pd.DataFrame([[5.0, 4.0], [3.0, 2.0]], index=["a", "b"], columns=["x", "y"]).stack().to_frame("rating")
    stacked.to_parquet(tmp_path / "a.parquet")
    table = read_ratings(tmp_path / "a.parquet")
    assert (table.rows.tolist(), table.columns.tolist()) == (["a", "a", "b", "b"], ["x", "y", "x", "y"])
    _, rows, columns = read_pairs(tmp_path / "a.parquet", text=(True, True))
    assert (rows.tolist(), columns.tolist()) == (table.rows.tolist(), table.columns.tolist())


def test_an_index_of_a_parquet_file_that_may_be_ids_or_numbers_of_lines_is_refused(tmp_path):
    names = ("user", "item", "rating", "time")
    path = indexed(tmp_path / "a.parquet", "user", names)
    for read in (read_ratings, lambda path: RatingShare(FileShare(path, ALONE), ALONE)):
        with pytest.raises(
            ValueError,
            match=r"'user' was the index of a data frame, .* --columns user,item,rating or item,rating,time",
        ):
            read(path)
    assert read_ratings(path, columns=("user", "item", "rating")).rows.tolist() == [7, 8, 8]
    # an index without a name has numbers of lines, and stands last
    frame = pd.DataFrame({"user": [1, 2, 3], "item": [1, 1, 2], "rating": [5, 4, 3]}).iloc[[2, 0, 1]]
    frame.to_parquet(tmp_path / "b.parquet")
    assert pl.read_parquet(tmp_path / "b.parquet").columns[-1] == "__index_level_0__"
    assert read_ratings(tmp_path / "b.parquet").rows.tolist() == [3, 1, 2]


@pytest.mark.parametrize("named", [("rating", "user", "item"), ("user", "Rating", "item")])
def test_a_column_of_ratings_is_not_taken_for_ids(tmp_path, named):
    rating = next(name for name in named if name.lower() == "rating")
    path = write(tmp_path / "a.csv", ",", named)
    with pytest.raises(ValueError, match=f"make '{rating}' a (row|column) id; .* --columns user,item,{rating}"):
        read_ratings(path)
    with pytest.raises(ValueError, match=f"make '{rating}' a (row|column) id; .* --columns user,item$"):
        read_pairs(path, text=(False, False))
    assert read_ratings(path, columns=("user", "item", rating)).names == ["user", "item", rating]
    assert read_ratings(path, columns=("1", "2", "3")).names == list(named)


@pytest.mark.parametrize("text", [b"[" * 9000, b"7}", b'[7, {"kind": "range"}]', b'["nobody"]}', b'["a", "a"]}'])
def test_a_description_of_a_data_frame_that_makes_no_sense_is_left_out(tmp_path, text):
    footer = b"\x15\x02" + b'{"index_columns": ' + text
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    assert index_of(tmp_path / "a.parquet", ["a", "b"]) == (["a"] if text.endswith(b'"a"]}') else [])
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + (2**31).to_bytes(4, "little") + b"PAR1")
    assert index_of(tmp_path / "b.parquet", ["a"]) == []
    (tmp_path / "c.parquet").write_bytes(b"PA")
    assert index_of(tmp_path / "c.parquet", ["a"]) == []


def test_columns_by_name_and_position(tmp_path):
    path = write(tmp_path / "a.csv", ",", ("time", "rating", "item", "user"), [("9", "4", "x", "u")])
    by_name = read_ratings(path, columns=("user", "item", "rating"))
    by_position = read_ratings(path, columns=("4", "3", "2"))
    assert by_name.rows.tolist() == by_position.rows.tolist() == ["u"]
    assert by_name.values.tolist() == by_position.values.tolist() == [4.0]
    with pytest.raises(ValueError, match=r"has no column 'score'; it has \['time', 'rating', 'item', 'user'\]"):
        read_ratings(path, columns=("user", "item", "score"))


def test_every_refusal_is_counted(tmp_path):
    lines = [*LINES, ("", "1", "2"), ("1", "1", ""), ("1", "1", "good"), ("1", "1", "nan"), ("1", "1", "inf")]
    table = read_ratings(write(tmp_path / "a.csv", ",", ("u", "i", "r"), lines))
    assert (table.n_read, sum(table.refused.values()), len(table.values)) == (8, 5, 3)
    assert table.refused == {
        "missing id": 1, "missing value": 1, "value is not a number": 1, "value is not finite": 2
    }  # fmt: skip


def test_values_whose_sum_would_not_be_finite_are_refused(tmp_path):
    """Files are no less strict than arrays: the mean of two values of 1e308 is infinite."""
    lines = [*LINES, ("8", "1", "1e308"), ("8", "2", "-1e301"), ("8", "3", "1e300"), ("8", "4", "1e309")]
    table = read_ratings(write(tmp_path / "a.csv", ",", ("u", "i", "r"), lines))
    assert table.refused == {"value is not finite": 1, "value is beyond 1e+300": 2}
    assert table.values.tolist() == [*(float(line[2]) for line in LINES), 1e300]


def test_text_in_the_value_column_is_an_error(tmp_path):
    path = write(tmp_path / "a.csv", ",", ("u", "i", "r"), [("1", "2", "good"), ("1", "3", "bad")])
    with pytest.raises(ValueError, match=r"none of 2 lines can be used .*value column 'r' starts with 'good'"):
        read_ratings(path)


def test_ids_keep_their_digits(tmp_path):
    path = write(tmp_path / "a.csv", ",", ("u", "i", "r"), [("007", "9223372036854775807", "1"), ("7", "5", "2")])
    table = read_ratings(path)
    assert table.rows.tolist() == ["007", "7"]
    assert table.columns.tolist() == [9223372036854775807, 5]
    beyond = write(tmp_path / "b.csv", ",", ("u", "i", "r"), [("99999999999999999999", "1", "1")])
    assert read_ratings(beyond).rows.tolist() == ["99999999999999999999"]


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_table(tmp_path / "nothing.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_table(tmp_path / "empty.csv")
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match="cannot be read as a table"):
        read_table(tmp_path / "bad.parquet")
    narrow = write(tmp_path / "narrow.csv", ",", ("u", "i"), [("1", "2")])
    with pytest.raises(ValueError, match=r"must have 3 columns \(row, column, value\)"):
        read_ratings(narrow)
    with pytest.raises(ValueError, match="format must be one of csv, tsv, ::, parquet, got 'xls'"):
        read_table(narrow, file_format="xls")


def test_pairs_follow_the_model(tmp_path):
    path = write(tmp_path / "p.csv", ",", None, [("1", "10"), ("2", "11")])
    table, rows, columns = read_pairs(path, text=(False, True))
    assert table.frame.height == 2
    assert rows.tolist() == [1, 2]
    assert columns.tolist() == ["10", "11"]
    no_digits = write(tmp_path / "n.csv", ",", None, [("ann", "tea"), ("bob", "rum")])
    assert read_pairs(no_digits, text=(True, True), header=False)[1].tolist() == ["ann", "bob"]
    assert read_pairs(no_digits, text=(True, True))[1].tolist() == ["bob"]
    gap = write(tmp_path / "g.csv", ",", ("u", "i"), [("1", "10"), ("", "11")])
    with pytest.raises(ValueError, match="the id in column 'u' is missing in data line 2"):
        read_pairs(gap, text=(False, False))


def wide(path, values, *, ids=(), header=True):
    """A matrix as CSV, one line per row, with ids before them or without."""
    lines = [",".join([*(str(i) for i in ids[k : k + 1]), *map(str, row)]) for k, row in enumerate(values)]
    names = [*(["user"] if ids else []), *(f"m{j}" for j in range(len(values[0])))]
    path.write_text("\n".join([*([",".join(names)] if header else []), *lines]) + "\n")
    return path


MATRIX = [[1, 5, "", 2, 3], [2, "", 4, 2, 3], [1, 5, 4, 5, ""], [2, 4, 4, "", 1]]


@pytest.mark.parametrize(
    ("values", "ids", "sign"),
    [
        ([[0.25, 1.5, 2.0, 3.5, 1], [0.5, 2.0, 1.0, 2.5, 3]], [], "column 'm1', which would be column ids, holds 1.5"),
        (MATRIX, [7, 8, 9, 10], "no row id in column 'user' occurs twice"),
        (MATRIX, ["ann", "ben", "cid", "dot"], "no row id in column 'user' occurs twice"),
    ],
)
def test_a_matrix_is_not_taken_for_a_list_of_entries(tmp_path, values, ids, sign):
    path = wide(tmp_path / "a.csv", values, ids=ids)
    with pytest.raises(ValueError, match=f"looks like a matrix.* it has {5 + bool(ids)} columns, .* and {sign}"):
        read_ratings(path)
    pl.read_csv(path).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"and {sign}; .* as in --columns {'user,m0,m1' if ids else 'm0,m1,m2'}$"):
        read_ratings(tmp_path / "a.parquet")
    assert len(read_ratings(path, columns=("1", "2", "4")).values) > 0
    with pytest.raises(ValueError, match="looks like a matrix"):
        read_ratings(wide(tmp_path / "b.csv", values, ids=ids, header=False))


def test_lists_of_entries_with_further_columns_are_read(tmp_path):
    lines = [("1", "x", "4.5", "9", "30", "0.5"), ("1", "y", "3", "8", "30", "0.5")]
    names = ("user", "item", "value", "time", "age", "share")
    table = read_ratings(write(tmp_path / "a.csv", ",", names, lines))
    assert (table.names, table.unexplained) == (["user", "item", "value"], ["age", "share"])
    numbers = [("1", "5", *line[2:]) for line in lines]
    assert read_ratings(write(tmp_path / "b.csv", ",", names, numbers)).unexplained == ["age", "share"]
    # users who rated once each: the name of the values tells
    once = [("1", "5", *lines[0][2:]), ("2", "5", *lines[1][2:])]
    assert len(read_ratings(write(tmp_path / "c.csv", ",", ("user", "item", "rating", *names[3:]), once)).values) == 2
    # as in MovieLens: a fourth column without a name is a time
    assert read_ratings(write(tmp_path / "d.csv", ",", None, [line[:4] for line in numbers])).unexplained == []
    fifth = write(tmp_path / "e.csv", ",", None, [line[:5] for line in numbers])
    assert read_ratings(fifth).unexplained == ["column_4", "column_5"]
    assert RatingShare(FileShare(fifth, ALONE), ALONE).unexplained == ["column_4", "column_5"]
