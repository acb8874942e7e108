"""One reader per format: every line is read or counted as rejected, and too many rejected ones are an error."""

import gzip
import io
import sys

import numpy as np
import polars as pl
import pytest

from fisherfold.tables import readers
from fisherfold.tables.readers import ids, numbers, read_pairs, read_ratings, read_table


def read(tmp_path, content, how=read_ratings, name="x.csv", **options):
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return how(tmp_path / name, **options)


LINES = [(1, 2, 3.0), (4, 5, 6.5)]


def text(mark, header=True, end="\n"):
    lines = [mark.join(map(str, line)) for line in LINES]
    return end.join(([mark.join(["user", "item", "rating"])] if header else []) + lines) + end


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("mark", [",", ";", "\t", "|", "::"])
@pytest.mark.parametrize("packed", [False, True])
def test_separators_and_headers_are_found_out(tmp_path, mark, header, packed):
    content = text(mark, header).encode()
    found = read(tmp_path, gzip.compress(content, mtime=0) if packed else content)
    assert list(zip(found.rows, found.columns, found.values, strict=True)) == LINES
    assert found.header == (["user", "item", "rating"] if header else None)
    assert (found.n_lines, found.rejected, found.others) == (2, {}, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("\n", "\r\n").encode(),
        lambda t: t.encode("utf-8-sig"),
        lambda t: t.encode("utf-16"),
        lambda t: t.rstrip("\n").encode(),
        lambda t: ("\n\n" + t + "\n\n").encode(),
        lambda t: t.replace("1", '"1"').encode(),
        lambda t: t.replace(",", " , ").encode(),
        lambda t: "".join(
            f"{k}{line}"
            for k, line in zip(
                ["", "0", "1"],
                t.replace("user", ",user")
                .replace("\n", "\n,")
                .removesuffix(",")
                .splitlines(keepends=True),
                strict=True,
            )
        ).encode(),
    ],
)
def test_forms_of_the_same_table(tmp_path, change):
    found = read(tmp_path, change(text(",")))
    assert list(zip(found.rows, found.columns, found.values, strict=True)) == LINES


def test_parquet_standard_input_and_encodings(tmp_path, monkeypatch):
    frame = pl.DataFrame({"u": ["a", "b"], "i": [1, 2], "r": [1, 2], "t": [5, 6]})
    frame.write_parquet(tmp_path / "x")
    stream = io.BytesIO()
    frame.write_parquet(stream)
    for source in (tmp_path / "x", "-"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stream.getvalue())))
        found = read_ratings(source, columns=["u", "2", "r"], time="t")
        assert (found.rows.tolist(), found.columns.tolist()) == (["a", "b"], [1, 2])
        assert (found.values.tolist(), found.times.tolist()) == ([1, 2], [5, 6])
    found = read(tmp_path, "é;x;1,5\n".encode("latin-1"), decimal=",", encoding="latin-1")
    assert (found.rows.tolist(), found.values.tolist()) == (["é"], [1.5])


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("index,user,item,rating", "123"),
        (",user,item,rating", "123"),
        ("timestamp,rating,item,user", "321"),
        ("item,user,liters,date", "102"),
        ("tag,item,user,stars,movie_year", "213"),
    ],
)
def test_ids_and_values_are_in_the_columns_with_usual_names(tmp_path, header, expected):
    cells = [str(k + 5) for k in range(header.count(",") + 1)]
    found = read(tmp_path, f"{header}\n{','.join(cells)}\n")
    wanted = [int(cells[int(k)]) for k in expected]
    assert [found.rows[0], found.columns[0], found.values[0]] == wanted
    _, rows, columns = read(tmp_path, f"{header}\n{','.join(cells)}\n", read_pairs)
    assert [rows[0], columns[0]] == wanted[:2]


def test_columns_of_other_names_are_those_that_were_named_or_known_before_or_pairs(tmp_path):
    content = "w,paper,reader,grade\n1,2,3,4\n"
    for how in (read_ratings, read_pairs):
        with pytest.raises(
            ValueError,
            match=r"x.csv: cannot tell which of the columns \['w', 'paper', 'b', 'grade'",
        ):
            read(tmp_path, "w,paper,b,grade\n1,2,3,4\n", how)
    for names in ({"known": ("reader", "paper", "grade")}, {"columns": ["3", "paper", "grade"]}):
        found = read(tmp_path, content, **names)
        assert (found.rows[0], found.columns[0], found.values[0], found.others) == (3, 2, 4, ["w"])
    with pytest.raises(
        ValueError, match=r"'movieId' and 'title' could each be the column id; name them, as in"
    ):
        read(tmp_path, "userId,movieId,title,rating\n1,2,x,3\n")
    for content in (
        "user,item\n1,2\n",
        "item,user\n2,1\n",
        "who,what\n1,2\n",
        "1,2\n",
        "date,user,item\nx,1,2\n",
    ):
        found = read(tmp_path, content, implicit=True)
        assert (found.rows[0], found.columns[0], found.values[0], found.has_values) == (
            1,
            2,
            1,
            False,
        )


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("5", 5.0),
        ("1970-01-02", 86400.0),
        ("1970-01-01 00:01", 60.0),
        ("1970-01-01T02:00:00+01:00", 3600.0),
    ],
)
def test_times_are_numbers_or_dates(tmp_path, cell, expected):
    found = read(tmp_path, f"user,item,rating,at\n1,2,3,{cell}\n", time="at")
    assert (found.times.tolist(), found.values.tolist()) == ([expected], [3.0])
    assert found.times.flags.writeable  # or torch warns, once a process
    with pytest.raises(ValueError, match="1 time is not a number"):
        read(tmp_path, "user,item,rating,at\n1,2,3,soon\n", time="at")


def test_rejected_lines_are_counted_by_reason_and_more_than_one_percent_is_an_error(tmp_path):
    bad = [
        "1,2,3,4",
        ",2,3",
        "1, ,3",
        "1,2,",
        "1,2",
        "1,2,x",
        "1,2,nan",
        "1,2,-inf",
        "1,2,1e301",
        "1,2,1.5.5",
    ]
    bad += ["1,2,1_0"]
    reasons = {
        "too many fields": 1,
        "missing id": 2,
        "missing value": 2,
        "value is not a number": 3,
        "value is not finite": 2,
        "value is beyond 1e+300": 1,
    }
    content = "u,i,r\n" + "\n".join(bad) + "\n7,8,9\n"
    found = read(tmp_path, content, skip_bad_lines=True)
    assert (found.rows.tolist(), found.n_lines, found.rejected) == ([7], 12, reasons)
    with pytest.raises(
        ValueError, match=r"11 of 12 lines \(91.7%\) cannot be used: 1 too many fields, 2 missing"
    ):
        read(tmp_path, content)
    few = read(tmp_path, "u,i,r\n" + "1,2,3\n" * 99 + "1,2,x\n")
    assert (few.n_lines, len(few.values), few.rejected) == (100, 99, {"value is not a number": 1})
    with pytest.raises(ValueError, match=r"has no ratings: 1 missing value"):
        read(tmp_path, "u,i,r\n1,2,\n", skip_bad_lines=True)


def test_a_quote_that_is_never_closed_costs_its_own_line_only(tmp_path):
    found = read(tmp_path, "u,i,r\n" + "1,2,3\n" * 200 + '1,"2,3\n' + "4,5,6\n" * 200)
    assert (len(found.values), found.n_lines, found.rejected) == (400, 401, {"malformed quotes": 1})


@pytest.mark.parametrize(
    ("cells", "decimal", "expected"),
    [
        (["1.5", " 2 ", "1e3", "1,5"], ".", [1.5, 2, 1000, None]),
        (["1,5", "2", "1.5", "1.234,5", "-,5"], ",", [1.5, 2, None, None, -0.5]),
    ],
)
def test_decimal_marks(cells, decimal, expected):
    assert numbers(pl.Series(cells), decimal).to_list() == expected


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["7", " 8"], [7, 8]),
        (["007", "8"], ["007", "8"]),
        (["+7"], ["+7"]),
        (["1.0"], ["1.0"]),
        ([1.0, 2.0], [1, 2]),
        ([str(2**63)], [str(2**63)]),
        (["é", "e\u0301"], ["é", "e\u0301"]),
        ([True], [1]),
    ],
)
def test_ids_of_a_file_are_integers_only_if_all_are(column, expected):
    assert ids(pl.Series("id", column)).tolist() == expected


@pytest.mark.parametrize(
    ("content", "how", "options", "message"),
    [
        ("", read_ratings, {}, "x.csv is empty"),
        ("\n\n", read_ratings, {}, "x.csv is empty"),
        ("u,i,r\n", read_ratings, {}, "x.csv has no lines below its header"),
        ("u,i\n", read_pairs, {}, "x.csv has no lines below its header"),
        ("u,i\na,b\n,c\n", read_pairs, {}, "the id in column 'u' is missing in data line 2"),
        (
            "u,i\na,b\na,b,c\n",
            read_pairs,
            {},
            "1 too many fields; every line must be a pair of ids",
        ),
        (
            "u,i\n1,2\n",
            read_ratings,
            {},
            r"which of the columns \['u', 'i'\] is the value; name them, as in --columns",
        ),
        (
            "u,i,r\n1,2,3\n",
            read_ratings,
            {"columns": ["u", "i", "x"]},
            "no column 'x'; its columns are u, i, r",
        ),
        ("u,i,r\n1,2,3\n", read_ratings, {"columns": ["u", "u", "r"]}, "3 different columns"),
        (
            "u,i,r\n1,2,3\n",
            read_ratings,
            {"separator": "ab"},
            "--separator must be one character or ::, got 'ab'",
        ),
        ("u,i,r\n1,2,3\n", read_ratings, {"decimal": "x"}, "--decimal must be . or ,"),
        (b"u,i,r\n1,\xe9,3\n", read_ratings, {}, "x.csv is not UTF-8 text; name its --encoding"),
        (b"u,i,r\n1,\xe9,3\n", read_ratings, {"encoding": "ascii"}, "is not text in ascii"),
        (b"u,i,r\n1,\xe9,3\n", read_ratings, {"encoding": "morse"}, "is not text in morse"),
        (b"\x28\xb5\x2f\xfd zstd", read_ratings, {}, "is not UTF-8 text; .* unpack it"),
        (
            gzip.compress(b"1,2,3\n" * 99, mtime=0),
            read_ratings,
            {"max_bytes": 99},
            "99 bytes unpacked; --unpack-limit",
        ),
        (gzip.compress(b"1,2,3\n" * 99, mtime=0)[:-9], read_ratings, {}, "is a damaged gzip file"),
        (
            gzip.compress(gzip.compress(b"1,2,3\n", mtime=0), mtime=0),
            read_ratings,
            {},
            "is not UTF-8 text",
        ),
        (b"PAR1 and what is no Parquet at all PAR1", read_ratings, {}, "cannot be read as Parquet"),
    ],
)
def test_what_is_no_table_is_named(tmp_path, content, how, options, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content, how, **options)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file"):
        read_table(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError, match=r"is a folder"):
        read_table(tmp_path)


def test_parquet_of_dates_and_lists_is_named(tmp_path):
    frame = pl.DataFrame({"u": [[1], [2]], "i": [1, 2], "r": [1.0, 2.0], "d": ["2020-01-01"] * 2})
    frame.with_columns(pl.col("d").str.to_date()).write_parquet(tmp_path / "x")
    with pytest.raises(ValueError, match=r"column 'u' holds List.*ids must be integers or text"):
        read_ratings(tmp_path / "x")
    with pytest.raises(ValueError, match=r"column 'd' holds Date, numbers are expected"):
        read_ratings(tmp_path / "x", columns=["i", "r", "d"])
    with pytest.raises(ValueError, match=r"more than 10 bytes unpacked"):
        read_ratings(tmp_path / "x", max_bytes=10)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_parts_of_a_file_are_the_whole(tmp_path, kind):
    frame = pl.DataFrame({"u": range(10), "i": range(10), "r": np.arange(10.0)})
    frame.write_csv(tmp_path / "x") if kind == "csv" else frame.write_parquet(tmp_path / "x")
    parts = [read_ratings(tmp_path / "x", part=(k, 3)) for k in range(3)]
    assert np.concatenate([part.rows for part in parts]).tolist() == list(range(10))
    assert sum(part.n_lines for part in parts) == 10


def test_a_wide_table_is_read_in_linear_time_and_names_are_made_distinct(tmp_path):
    n = 40_000
    found = read(
        tmp_path,
        ",".join(f"f{k}" for k in range(n)) + "\n" + ",".join(["1"] * n) + "\n",
        read_table,
    )
    assert found.frame.shape == (1, n)
    assert read(tmp_path, "a,,a\nx,y,z\n", read_table).frame.columns == ["a", "column_2", "a_2"]


@pytest.mark.slow
def test_one_line_with_a_field_more_costs_no_more_memory(tmp_path):
    """65 MB of text, read in a process of its own; 0.1.0 went to 3 GB."""
    import subprocess

    content = "user,item,rating\n" + "123456,654321,4.5\n" * 1_000_000 + "1,2,3,4\n"
    (tmp_path / "x.csv").write_text(content)
    script = (
        "import resource, sys; from fisherfold.tables.readers import read_ratings; import torch, polars\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = read_ratings(sys.argv[1]); assert found.rejected == {'too many fields': 1}\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)"
    )
    command = [sys.executable, "-c", script, tmp_path / "x.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 * len(content)


def test_the_readers_say_what_was_not_read(tmp_path):
    assert read(tmp_path, "u,i,r,when\na,b,3,9\n").others == ["when"]
    assert readers.BAD_SHARE == 0.01
