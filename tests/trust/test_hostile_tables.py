"""Hostile tables: whatever a file holds, each of its lines is read or refused with a reason; nothing is executed."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import resource
import subprocess
import sys
import zlib

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from fisherfold.cli import app
from fisherfold.completion import MatrixCompletion
from fisherfold.tables.table_files import read_table
from fisherfold.tables.tables import read_pairs, read_ratings


@pytest.fixture
def put(tmp_path):
    def write(content, name="r.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def entries(table):
    return list(zip(table.rows.tolist(), table.columns.tolist(), table.values.tolist(), strict=True))


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (codecs.BOM_UTF8 + "u,i,r\nÅsa,茶,3\n".encode(), None),
        ("u,i,r\nÅsa,茶,3\n".encode(), None),
        ("u,i,r\nÅsa,茶,3\n".encode("utf-16"), None),
        ("\ufeffu,i,r\r\nÅsa,茶,3\r\n".encode("utf-16-be"), None),
        ("u,i,r\nÅsa,茶,3\n".encode("gb18030"), "gb18030"),
    ],
)
def test_encodings(put, content, encoding):
    table = read_ratings(put(content), encoding=encoding)
    assert entries(table) == [("Åsa", "茶", 3.0)]
    assert table.header == ["u", "i", "r"]


def test_mixed_encodings_never_make_one_id_of_two(put):
    """Müller and Möller in Latin-1 inside a UTF-8 file would both become M\\ufffdller."""
    content = "u,i,r\nMüller,a,1\n".encode() + "Müller,a,2\nMöller,a,3\n".encode("latin-1")
    table = read_ratings(put(content))
    assert entries(table) == [("Müller", "a", 1.0)]
    assert table.refused == {"id is not UTF-8 text": 2}
    with pytest.raises(ValueError, match=r"the id in column 'u' is not UTF-8 text in data line 2"):
        read_pairs(put(content), text=(True, True))
    assert entries(read_ratings(put("u,i,r\nMöller,a,3\n".encode("latin-1")), encoding="latin-1"))[0][0] == "Möller"
    with pytest.raises(ValueError, match="there is no encoding 'martian'"):
        read_ratings(put(content), encoding="martian")
    with pytest.raises(ValueError, match=r"r.csv is not ascii text"):
        read_ratings(put(content), encoding="ascii")


def test_quotes(put):
    table = read_ratings(put('u,i,r\n"a\nb","c,d",1\n"say ""x""",e,2\n'))
    assert entries(table) == [("a\nb", "c,d", 1.0), ('say "x"', "e", 2.0)]
    assert table.n_read == 2


def test_broken_lines_are_refused_alone(put):
    """One stray quote or one field too many costs that line, not the file and not the lines after it."""
    lines = ["u,i,r", "a,b,1", "a,c,2,9,9", 'a,"d,3', 'a,5" disk,4', "", "b,b", "b,c,6"]
    table = read_ratings(put("\n".join(lines) + "\n"))
    assert entries(table) == [("a", "b", 1.0), ("a", '5" disk', 4.0), ("b", "c", 6.0)]
    assert table.n_read == 7
    assert table.refused == {"too many fields": 1, "broken quotes or line ends": 1, "blank line": 1, "missing value": 1}
    alone = read_ratings(put('u,i,r\na,b,1\na,"d,3\nb,c,6\n'))
    assert entries(alone) == [("a", "b", 1.0), ("b", "c", 6.0)]
    assert alone.refused == {"broken quotes or line ends": 1}


def test_the_slow_reader_agrees_with_the_fast_one(put):
    """A ragged line sends the whole file through the slow reader; all else must come out the same."""
    rng = np.random.default_rng(0)
    ids = ["x", "007", "a b", '"q,q"', '"l\nl"', '"l\r\nl"', "ü", "漢", ""]
    lines = [f"{ids[a]},{ids[b]},{a - b / 7:.3f}" for a, b in rng.integers(9, size=(300, 2))]
    fast = read_ratings(put("u,i,r\n" + "\n".join(lines) + "\n"))
    slow = read_ratings(put("u,i,r\n" + "\n".join(lines) + "\n1,2,3,4\n"))
    assert entries(fast) == entries(slow)
    assert slow.refused == fast.refused | {"too many fields": 1}


def test_duplicates_have_a_rule(put):
    path = put("u,i,r\na,x,1\na,x,3\na,y,2\nb,x,2\nb,y,5\n")
    found = json.loads(CliRunner().invoke(app, fit_words(path, "--json")).stdout)
    assert (found["lines"], found["ratings"], found["merged"]) == (5, 4, 1)
    result = CliRunner().invoke(app, fit_words(path, "--duplicates", "error"))
    assert "1 entry repeats a pair that was given before" in str(result.exception)


def fit_words(path, *more):
    return ["complete", "fit", str(path), "--rank", "1", "-o", str(path.parent / "model"), *more]


def test_ids_of_any_script_keep_their_code_points(put):
    """é in one code point and in two are different ids, as are a and а (Cyrillic); only white space around goes."""
    names = ["é", "e\u0301", "a", "а", "ا", "\u202eabc", "𝒳", "👩‍👩‍👧", "A", "a\u200b", " a", "a\u00a0"]
    table = read_ratings(put("u,i,r\n" + "".join(f"{name},x,{k}\n" for k, name in enumerate(names))))
    assert table.rows.tolist() == [*names[:10], "a", "a"]
    model = MatrixCompletion(rank=1).fit(np.column_stack([table.rows, table.columns]), table.values)
    assert len(model.model_.row_ids) == 10


def test_ids_survive_a_model_file(put, tmp_path):
    names = ["é", "e\u0301", "\u202eabc", "👩‍👩‍👧", "../../etc/passwd", "=cmd|'/C calc'!A0", "\x00\x1b[31m", "null"]
    X = [(name, k % 2) for name in names for k in range(2)]
    model = MatrixCompletion(rank=1).fit(np.array(X, dtype=object), np.arange(len(X), dtype=float))
    model.save(tmp_path / "m")
    again = MatrixCompletion.load(tmp_path / "m")
    assert again.model_.row_ids.labels.tolist() == names
    assert again.predict(np.array(X, dtype=object)).tobytes() == model.predict(np.array(X, dtype=object)).tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "r.csv is empty"),
        ("\n\n\n", "r.csv is empty"),
        ("  \n", "r.csv is empty"),
        ("u,i,r\n", r"none of 0 lines can be used \(no lines\)"),
        ("u,i,r", r"none of 0 lines can be used \(no lines\)"),
        ("u,i\n1,2\n", r"must have 3 columns \(row, column, value\), got \['u', 'i'\]"),
        ("u,i,r\n1,2,good\n1,3,bad\n", r"none of 2 lines can be used \(2 value is not a number\).*starts with 'good'"),
        ("u,i,r\n1,2,inf\n1,3,nan\n1,4,\n", r"\(1 missing value, 2 value is not finite\)"),
        ("u,i,r\n1,2,3,4\n5,6,7,8\n", r"none of 2 lines can be used \(2 too many fields\)"),
        (b"PAR1 not really", "cannot be read as a table"),
        (b"PK\x03\x04zip", "is packed with zip; unpack it first"),
        (b"\x28\xb5\x2f\xfdzstd", "is packed with zstd"),
        (b"\x1f\x8b\x08nothing", "is a damaged gzip file"),
        (b"x" * (2**20 + 10), "its first line has more than 1,048,576 bytes"),
    ],
)
def test_files_without_ratings_say_why(put, content, message):
    with pytest.raises(ValueError, match=message):
        read_ratings(put(content))


def test_numbers_in_disguise(put):
    values = ["1e3", " 2 ", "+3", "-4.5", "1_000", "0x10", "1,,5", "٣", "1/2", "infinity", "-nan", "1e999", "no", "5 s"]
    table = read_ratings(put("u\ti\tr\n" + "".join(f"a\t{k}\t{v}\n" for k, v in enumerate(values)), "r.tsv"))
    assert dict(zip(table.columns.tolist(), table.values.tolist(), strict=True)) == {0: 1000.0, 1: 2.0, 2: 3.0, 3: -4.5}
    assert sum(table.refused.values()) == 10
    assert table.refused["value is not finite"] == 3


def test_old_line_ends_and_leading_blank_lines(put):
    assert entries(read_ratings(put("u,i,r\r1,2,3\r4,5,6\r"))) == [(1, 2, 3.0), (4, 5, 6.0)]
    assert entries(read_ratings(put("\n\r\nu,i,r\n1,2,3\n"))) == [(1, 2, 3.0)]


def test_header_names_are_only_names(put):
    frame = read_table(put("u,u,,../x\n1,2,3,4\n")).frame
    assert frame.columns == ["u", "u_2", "column_3", "../x"]
    assert frame.rows() == [("1", "2", "3", "4")]


def test_a_path_is_never_a_pattern(put, tmp_path):
    put("u,i,r\n1,1,1\n", "ra.csv")
    assert entries(read_ratings(put("u,i,r\n2,2,2\n", "r[a].csv"))) == [(2, 2, 2.0)]
    pl.DataFrame({"u": [1], "i": [1], "r": [1.0]}).write_parquet(tmp_path / "pa.parquet")
    pl.DataFrame({"u": [2], "i": [2], "r": [2.0]}).write_parquet(str(tmp_path / "q.parquet"))
    (tmp_path / "q.parquet").rename(tmp_path / "p?.parquet")
    assert entries(read_ratings(tmp_path / "p?.parquet")) == [(2, 2, 2.0)]


def test_gzip(put):
    assert entries(read_ratings(put(gzip.compress(b"u::i::r\n1::2::3\n"), "r.dat.gz"))) == [(1, 2, 3.0)]
    assert entries(read_ratings(put(gzip.compress(b"u;i;r\n1;2;3\n"), "noname"))) == [(1, 2, 3.0)]
    two_members = gzip.compress(b"u,i,r\n1,2,3\n") + gzip.compress(b"4,5,6\n")
    assert len(read_ratings(put(two_members, "r.csv.gz")).values) == 2
    for cut in (5, 12, -4):
        with pytest.raises(ValueError, match="is a damaged gzip file"):
            read_ratings(put(gzip.compress(b"u,i,r\n1,2,3\n")[:cut], "r.csv.gz"))


def test_gzip_bombs_stop_at_the_limit(put):
    """200 MiB of one line, packed into 200 kB, in a process that may not hold them."""
    bomb = put(gzip.compress(b"u,i,r\n" + b"1,2,3\n" * (200 * 2**20 // 6), compresslevel=1), "bomb.csv.gz")
    assert bomb.stat().st_size < 2**21
    with pytest.raises(ValueError, match=r"unpacks to more bytes than that, 1,048,576 bytes are allowed; raise"):
        read_ratings(bomb, max_bytes=2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = CliRunner().invoke(app, fit_words(bomb, "--unpack-limit", "0.01"))
    assert "raise the limit (max_bytes, --unpack-limit)" in str(result.exception)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, lambda b: codecs.BOM_UTF8 + b"\n" + gzip.compress(b)])
def test_nothing_is_unpacked_twice_or_behind_a_mark(put, pack):
    """The fast reader unpacks what looks packed, without a limit; it never gets to see that."""
    inner = pack(b"u,i,r\n1,2,3\n")
    for content in (inner, gzip.compress(inner)):
        if content[:2] == b"\x1f\x8b" and content is inner:
            continue
        with pytest.raises(ValueError, match=r"t\.csv"):
            read_ratings(put(content, "t.csv"))
    assert read_ratings(put("x^2,i,r\n1,2,3\n")).header == ["x^2", "i", "r"]


def test_parquet_bombs_stop_at_the_limit(tmp_path):
    """A billion equal rows pack into nothing; the claim is read, not the rows."""
    frame = pl.DataFrame({"u": np.zeros(2**22, np.int64), "i": np.zeros(2**22, np.int64), "r": np.zeros(2**22)})
    frame.write_parquet(tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 2**20
    with pytest.raises(ValueError, match=r"unpacks to 4,194,304 rows of 3 columns, 1,048,576 bytes are allowed"):
        read_ratings(tmp_path / "bomb.parquet", max_bytes=2**20)


def test_parquet_columns_of_any_type(tmp_path):
    frame = pl.DataFrame({
        "u": ["a", "b", None], "i": [1.5, 2.0, 3.0], "r": ["1", "2", "3"], "l": [[1], [2], [3]],
        "d": [True, False, True], "s": [{"x": 1}] * 3, "b": [b"\xff", b"\x00", b""],
    })  # fmt: skip
    frame.write_parquet(tmp_path / "t.parquet")
    table = read_ratings(tmp_path / "t.parquet")
    assert entries(table) == [("a", "1.5", 1.0), ("b", "2", 2.0)]
    assert table.refused == {"missing id": 1}
    for columns in (("l", "i", "r"), ("u", "s", "r"), ("u", "i", "l"), ("b", "i", "r"), ("u", "i", "s")):
        with pytest.raises(ValueError, match=r"t.parquet"):
            read_ratings(tmp_path / "t.parquet", columns=columns)


def test_pairs_without_digits_need_no_option(put, tmp_path):
    """A first line that names an id of the model is data."""
    X = [(a, b) for a in ("ann", "bob", "eve") for b in ("tea", "rum", "gin")]
    MatrixCompletion(rank=1).fit(np.array(X, dtype=object), np.arange(9.0)).save(tmp_path / "m")

    def predict(content):
        words = ["complete", "predict", str(tmp_path / "m"), str(put(content)), "-o", str(tmp_path / "o.csv"), "--json"]
        return json.loads(CliRunner().invoke(app, words).stdout)

    found = predict("ann,tea\nbob,rum\n")
    assert (found["pairs"], found["header"]) == (2, "none")
    assert predict("zoe,tea\nbob,rum\n")["pairs"] == 2
    found = predict("user,item\nann,tea\n\n")
    assert (found["pairs"], found["header"], found["lines"]) == (1, "user, item", 2)
    assert found["refused"] == {"blank line": 1}


def test_the_account_adds_up_for_any_junk(put):
    """Random bytes with separators, quotes and line ends: read + refused is what the file holds."""
    letters = [b"a", b"1", b",", b",", b"\n", b"\n", b'"', b" ", b"\xff", "é".encode(), b"\r", b"::", b"\0", b"-2"]
    for seed in range(300):
        random.seed(seed)
        body = b"".join(random.choices(letters, k=60))
        path = put(b"u,i,r\n" + body + b"\nok,ok,1\n")
        table = read_ratings(path)
        assert sum(table.refused.values()) + len(table.values) == table.n_read, seed
        assert ("ok", "ok", 1.0) in entries(table), seed
        assert np.isfinite(table.values).all()


def test_counts_are_printed(put):
    path = put("u,i,r\na,x,1\na,y,2\nb,x,bad\nb,y,inf\n,y,2\nb,y,4,5\n\nb,y,3\n")
    text = CliRunner().invoke(app, fit_words(path)).stdout
    flat = " ".join(text.replace("│", " ").split())
    for reason in ("too many fields: 1", "blank line: 1", "missing id: 1", "value is not a number: 1", "not finite: 1"):
        assert reason in flat
    found = json.loads(CliRunner().invoke(app, fit_words(path, "--json")).stdout)
    assert found["lines"] == 8
    assert sum(found["refused"].values()) + found["ratings"] == 8


@pytest.mark.slow
def test_ten_million_distinct_ids(tmp_path):
    """Text ids in a process of its own, whose peak memory is read."""
    path = tmp_path / "many.csv"
    frame = pl.DataFrame({"u": np.arange(10**7), "i": np.arange(10**7) % 1000, "r": np.ones(10**7)})
    frame.with_columns("u" + pl.col("u").cast(pl.String)).write_csv(path)
    script = f"""
import resource, numpy as np
from fisherfold.tables.tables import read_ratings
from fisherfold.tables.ids import IdIndex
table = read_ratings({str(path)!r})
index = IdIndex(table.rows)
assert len(index) == 10**7 and index.numbers(table.rows[-3:]).tolist() == [10**7 - 3, 10**7 - 2, 10**7 - 1]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 6 * 2**20
