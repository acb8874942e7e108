"""Decimal marks: a table is read with the one mark that all of its values allow, or refused with a line."""

from __future__ import annotations

import gzip
import re
import tempfile
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherfold.tables.decimals import is_comma_number, parse, written
from fisherfold.tables.tables import read_pairs, read_ratings

ENGLISH = re.compile(r"[+-]?([0-9]*|[1-9][0-9]{0,2}(,[0-9]{3})+)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
SEPARATED = [
    ("r.csv", ";"), ("r.csv", "::"), ("r.csv", "\t"), ("r.tsv", "\t"), ("r.txt", ";"), ("r.txt", "|"), ("r.dat", "::"),
]  # fmt: skip
numbers = st.floats(-1e300, 1e300).map(repr) | st.integers(-(10**6), 10**6).map(str)  # beyond, values are refused


def put(folder, text, name="r.csv"):
    path = Path(folder) / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(values, separator, header, first=("1,5", "x, y")):
    rows = [(*first, value) for value in values]
    return "".join(separator.join(row) + "\n" for row in ([("user", "item", "rating")] if header else []) + rows)


@given(st.lists(numbers, min_size=1, max_size=8), st.sampled_from(SEPARATED), st.booleans(), st.booleans())
def test_commas_are_read_as_points_would_be(values, form, header, packed):
    """Each value to the bit, whatever parts the fields; ids keep their commas."""
    name, separator = form
    commas = [value.replace(".", ",") for value in values]
    with tempfile.TemporaryDirectory() as folder:
        text = lines([*commas, "0,5"], separator, header).encode()
        path = put(folder, gzip.compress(text) if packed else text, name + ".gz" * packed)
        table = read_ratings(path)
        assert (table.decimal, sum(table.refused.values())) == (",", 0)
        assert table.values.tolist() == [*map(float, values), 0.5]
        assert set(table.rows) == {"1,5"}
        assert set(table.columns) == {"x, y"}
        named = read_ratings(path, decimal=",")
        assert named.values.tobytes() == table.values.tobytes()


@given(st.lists(numbers, min_size=1, max_size=8), st.booleans())
def test_quoted_commas_in_a_file_that_is_cut_at_commas(values, header):
    with tempfile.TemporaryDirectory() as folder:
        quoted = ['"' + value.replace(".", ",") + '"' for value in [*values, "0.5"]]
        path = put(folder, lines(quoted, ",", header, ("ann", '"x, y"')))
        table = read_ratings(path)
        assert table.values.tolist() == [*map(float, values), 0.5]
        assert set(table.columns) == {"x, y"}


@settings(max_examples=500)
@given(st.text("0123456789,.+-eE '", max_size=9))
def test_a_field_with_a_comma_is_a_number_if_the_parser_says_so(text):
    """One pattern is behind headers, separators and the rule, one parser behind the values: they agree."""
    read = parse(pl.Series([text]), ",")[0]
    if "," in text and read is not None:
        assert is_comma_number(text)
        assert read == float(text.strip().replace(",", "."))
    if is_comma_number(text) and read is None:
        assert len(re.findall(r"[.,' ]", text.strip())) > 1, "thousands separators"


values_of_all_kinds = st.sampled_from(
    ["3", "-7", "1e3", "3.5", "1.234", ".5", "3,5", "0,125", ",5", "5,", "1,5e3", "1,234", "-12,345", "1.234,5",
     "1,234.5", "1,234,567", "1.234.567", "1 234,5", "1'234,5", "1,23,456.7", "1,2,3", "tea, green", "7,5 kg", "",
     "nan", "bad", ","]
)  # fmt: skip


@settings(max_examples=500)
@given(st.lists(values_of_all_kinds, min_size=1, max_size=5))
def test_nothing_is_read_that_could_mean_something_else(values):
    """Where commas are taken for decimal marks, some value rules out that they part thousands; no number is lost."""
    with tempfile.TemporaryDirectory() as folder:
        numbered = "".join(f"{k};1,5;{value}\n" for k, value in enumerate([*values, "2"]))
        path, table, message = put(folder, f"user;item;rating\n{numbered}"), None, ""
        try:
            table = read_ratings(path)
        except ValueError as error:
            message = str(error)
        if table is None:
            line = re.findall(r"column 'rating', data line ([1-6])", message)[0]
            assert "," in values[int(line) - 1]
            for mark in ".,":  # a mark that is named leaves nothing to decide
                assert 2.0 in read_ratings(path, decimal=mark).values
            return
        kept = [values[k] for k in table.rows if k < len(values)]
        with_comma = [value for value in kept if "," in value]
        assert bool(with_comma) == (table.decimal == ",")
        assert not with_comma or not all(ENGLISH.fullmatch(value) for value in with_comma)
        assert not (with_comma and any("." in value for value in kept))
        if not with_comma:
            assert not any(ENGLISH.fullmatch(value) for value in values if "," in value and re.search("[0-9]", value))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["3,5", "4", "3.5"], "'3,5' (column 'r', data line 1) has a comma, '3.5' (column 'r', data line 3) a point"),
        (["2.5", "1,234"], "'1,234' (column 'r', data line 2) has a comma, '2.5' (column 'r', data line 1) a point"),
        (["3,5", "1.234,5"], "'1.234,5' (column 'r', data line 2) has thousands separators; write numbers without"),
        (["3.5", "1,234.5"], "'1,234.5' (column 'r', data line 2) has thousands separators"),
        (["7", "1\u202f234,5"], "has thousands separators"),
        (["7", "1,234", "12,345"], "'1,234' (column 'r', data line 2) may be a decimal or thousands, and no other"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused_with_its_line(tmp_path, values, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_ratings(put(tmp_path, "u;i;r\n" + lines(values, ";", False)))
    assert "name the decimal mark (decimal, --decimal), and what is written otherwise counts as no number" in str(error)


def test_a_mark_that_is_named_decides(tmp_path):
    path = put(tmp_path, lines(["3,5", "3.5", "1.234,5", "1,234", "2"], ";", True))
    comma, point = read_ratings(path, decimal=","), read_ratings(path, decimal=".")
    assert comma.values.tolist() == [3.5, 1.234, 2.0]
    assert point.values.tolist() == [3.5, 2.0]
    assert (comma.refused, point.refused) == ({"value is not a number": 2}, {"value is not a number": 3})
    with pytest.raises(ValueError, match=r"decimal must be '\.' or ',', got ';'"):
        read_ratings(path, decimal=";")


def test_a_comma_between_fields_is_never_a_decimal_mark(tmp_path):
    path = put(tmp_path, "1,2,3,5\n1,3,4,5\n")
    assert read_ratings(path).values.tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match="is cut at commas and has no header that tells how often"):
        read_ratings(path, decimal=",")
    table = read_ratings(put(tmp_path, 'u,i,r\n1,2,3,5\n1,3,"4,5"\n'), decimal=",")
    assert (table.values.tolist(), table.refused) == ([4.5], {"too many fields": 1})


@pytest.mark.parametrize(
    ("first", "rows", "columns"),
    [
        ("1,5;2;3,5", "1,5", 2), ("1,5;2,5;3,5", "1,5", "2,5"), ("1;a,b;3,5", 1, "a,b"), ("1,5|2|3,5", "1,5", 2),
        ("x;a,b,7,8;3,5", "x", "a,b,7,8"),
    ],
)  # fmt: skip
def test_commas_inside_fields_of_a_csv_part_none(tmp_path, first, rows, columns):
    """As many commas as semicolons, or more: cut at the commas, the first would be row 1, column 5;2;3 and value 5."""
    table = read_ratings(put(tmp_path, first + "\n"))
    assert (table.rows.tolist(), table.columns.tolist()) == ([rows], [columns])
    assert table.header is None


def test_semicolons_inside_fields_part_none_either(tmp_path):
    for more in ("thriller;drama;war", "thriller|drama|war|1,5|western"):
        assert read_ratings(put(tmp_path, f"1,2,3.5,{more}\n1,3,2,comedy\n")).values[0] == 3.5
    assert read_ratings(put(tmp_path, "1\t2\t3\tdrama;1,5;war\n", "r.tsv")).values.tolist() == [3.0]


def test_a_first_line_of_words_and_a_decimal_comma_is_data(tmp_path):
    assert read_ratings(put(tmp_path, "ann;tea;3,5\nbob;rum;4\n")).rows.tolist() == ["ann", "bob"]


def test_parquet_with_text(tmp_path):
    frame = pl.DataFrame({"u": ["1,5", "b"], "i": [7, 8], "r": ["1,5", "2"]})
    frame.write_parquet(tmp_path / "a.parquet")
    table = read_ratings(tmp_path / "a.parquet")
    assert (table.rows.tolist(), table.values.tolist()) == (["1,5", "b"], [1.5, 2.0])


def test_pairs_keep_their_commas(tmp_path):
    table, rows, columns = read_pairs(put(tmp_path, "u;i;r\n1,5;2,50;3,5\n"), text=(True, True))
    assert (rows.tolist(), columns.tolist(), table.frame.row(0)) == (["1,5"], ["2,50"], ("1,5", "2,50", "3,5"))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_what_is_written_is_read_again(values):
    for mark in ".,":
        text = written(values, mark).cast(pl.String)
        assert parse(text, mark).to_list() == values
