"""Parquet that is damaged, swollen or left by a writer that failed: a sentence, never the end of the process."""

import io
import json
import os
import random
import shutil
import subprocess
import sys

import polars as pl
import pytest

import fisherfold.tables.parquet as module
from fisherfold.tables.parquet import parquet_files, read_parquet
from fisherfold.tables.readers import read_ratings, read_table
from toy import slow

FRAME = pl.DataFrame(
    {
        "user": [f"u{i % 17}" for i in range(200)],
        "item": [i % 13 for i in range(200)],
        "rating": [float(i % 5) for i in range(200)],
    }
)


def packed(frame, **options):
    buffer = io.BytesIO()
    frame.write_parquet(buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("codec", ["snappy", *slow("zstd", "uncompressed")])
@pytest.mark.parametrize("count", [4, *slow(100)])
def test_flipped_bits_are_an_error_or_a_table(tmp_path, codec, count):
    content, chance = packed(FRAME, compression=codec), random.Random(0)
    for _ in range(count):
        damaged = bytearray(content)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        (tmp_path / "x.parquet").write_bytes(damaged)
        said = f"{tmp_path}/x.parquet"
        try:
            read_table(tmp_path / "x.parquet")
        except ValueError as error:
            said = str(error)
        assert f"{tmp_path}/x.parquet" in said


@pytest.mark.parametrize("how", ["os.abort()", *slow("os._exit(0)", "os.kill(os.getpid(), 9)")])
def test_a_decoder_that_ends_its_process_is_an_error_that_names_the_part(
    tmp_path, monkeypatch, how
):
    """As allocations that fail do, whatever bit of whatever version brings them about."""
    for name in ("a", "b"):
        FRAME.write_parquet(tmp_path / f"{name}.parquet")
    code = (
        "import os, polars, sys, fisherfold.tables.parquet as module\n"
        "scan = module._scan\n"
        f"module._scan = lambda path: {how} if 'b.parquet' in str(path) else scan(path)\n"
        "module._work(sys.stdin.buffer)"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        module.subprocess,
        "Popen",
        lambda words, **options: start([words[0], "-c", code], **options),
    )
    with pytest.raises(ValueError, match=r"its part .*b\.parquet cannot be read.* it is damaged"):
        read_table(tmp_path)


def test_a_bomb_counts_the_bytes_of_its_text(tmp_path):
    """Four kilobytes for five gigabytes: one text in every cell."""
    for kind in (pl.String, pl.Categorical, pl.Binary, pl.List(pl.String)):
        text = pl.Series(["x" * 2**20]).cast(pl.String)
        cell = {
            pl.String: text,
            pl.Categorical: text.cast(pl.Categorical),
            pl.Binary: text.cast(pl.Binary),
            pl.List(pl.String): text.implode(),
        }[kind]
        frame = pl.DataFrame({"u": cell.extend(cell)}).select(pl.col("u").repeat_by(500).explode())
        content = packed(frame, compression="zstd")
        assert len(content) < 2**20
        with pytest.raises(ValueError, match="more than 67,108,864 bytes unpacked"):
            read_parquet(content, "x", 2**26)


def test_what_an_unfinished_writer_left_is_no_part(tmp_path):
    FRAME.write_parquet(tmp_path / "part-0.parquet")
    for folder in ("_temporary/0", ".staging", "year=2024"):
        (tmp_path / folder).mkdir(parents=True)
        FRAME.write_parquet(tmp_path / folder / "part-1.parquet")
    (tmp_path / "_metadata.parquet").touch()
    assert [f.relative_to(tmp_path).as_posix() for f in parquet_files(tmp_path)] == [
        "part-0.parquet",
        "year=2024/part-1.parquet",
    ]
    assert read_ratings(tmp_path).n_lines == 400
    hidden = tmp_path / "_run" / "table"
    hidden.mkdir(parents=True)
    shutil.copy(tmp_path / "part-0.parquet", hidden)
    assert read_ratings(hidden).n_lines == 200  # the folder that was named may have any name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-9], "."),
        (lambda content: packed(FRAME.drop("rating")), r"its columns are .*those of the first"),
        (lambda content: packed(FRAME.cast({"item": pl.String})), r"item \(String\)"),
    ],
)
def test_an_error_names_the_part(tmp_path, change, reason):
    for name in ("a", "b", "c"):
        FRAME.write_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "b.parquet").write_bytes(change((tmp_path / "b.parquet").read_bytes()))
    with pytest.raises(ValueError, match=rf"its part .*b\.parquet cannot be read.*{reason}"):
        read_table(tmp_path)


def test_parts_of_several_files_are_the_whole(tmp_path):
    kinds = {
        "i": pl.Series([1, None, 3], dtype=pl.UInt8),
        "c": pl.Series(["a", "b", "a"], dtype=pl.Categorical),
        "d": pl.Series(["2024-01-01"] * 3).str.to_date(),
        "l": pl.Series([[1], [], None]),
        "s": pl.Series([{"x": 1.5, "y": "z"}] * 3),
    }
    frame = pl.concat([pl.DataFrame(kinds)] * 7)
    for k, (start, size) in enumerate(((0, 4), (4, 0), (4, 17))):
        frame[start : start + size].write_parquet(tmp_path / f"{k}.parquet")
    for cuts in (1, 4):
        parts = [read_table(tmp_path, part=(k, cuts)).frame for k in range(cuts)]
        assert pl.concat(parts).equals(frame)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limit from /proc")
def test_the_worker_is_limited_in_memory(tmp_path):
    """What no check counts cannot take the memory of the machine."""
    code = (
        "import sys, fisherfold.tables.parquet as module\n"
        "module._decode = lambda *_: bytearray(2**36)\n"
        "module._work(sys.stdin.buffer)"
    )
    order = json.dumps({"files": ["x"], "max_bytes": 2**20, "part": [0, 1]}).encode()
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=order + b"\n",
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout[8:9] == b"e"
