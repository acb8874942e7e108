"""Tables with predictions: whole or absent, never over a model, all bytes through a slow pipe."""

import gzip
import subprocess
import sys

import numpy as np
import polars as pl
import pytest

from fisherfold.tables.folders import save_folder
from fisherfold.tables.readers import read_ratings
from fisherfold.tables.writers import add_columns, check_table_name, write_table

FRAME = pl.DataFrame({"u": ["a", "b;c"], "i": [1, 2], "r": [1.5, -2.0]})


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz", "x.parquet", "x"])
@pytest.mark.parametrize("decimal", [".", ","])
def test_what_is_written_is_read_again(tmp_path, name, decimal):
    for _ in range(2):
        check_table_name(tmp_path / name)
        write_table(FRAME, tmp_path / name, decimal)
        first = (tmp_path / name).read_bytes()
    found = read_ratings(tmp_path / name, decimal=decimal)
    assert (found.rows.tolist(), found.columns.tolist(), found.values.tolist()) == (
        ["a", "b;c"],
        [1, 2],
        [1.5, -2.0],
    )
    assert name != "x.csv.gz" or gzip.decompress(first).startswith(b"u")


def test_no_column_of_the_table_is_lost(tmp_path):
    frame = add_columns(FRAME, {"std": np.ones(2), "prediction": np.zeros(2)}, "x.csv")
    assert frame.columns == ["u", "i", "r", "std", "prediction"]
    with pytest.raises(ValueError, match=r"x.csv has a column 'prediction' already, .*; rename it"):
        add_columns(frame, {"prediction": np.zeros(2)}, "x.csv")
    with pytest.raises(ValueError, match=r"column 'l' holds List"):
        write_table(pl.DataFrame({"l": [[1]]}), tmp_path / "x.csv")


@pytest.mark.parametrize(
    "name", ["x.xlsx", "x.json", "m/model.json", "m/new.csv", "copy", "m", "no/x.csv"]
)
def test_names_that_cannot_hold_a_table_are_rejected_before_the_work(tmp_path, name):
    save_folder(tmp_path / "m", "completion", {"a": np.zeros(1)}, {})
    (tmp_path / "copy").write_bytes((tmp_path / "m" / "model.safetensors").read_bytes())
    with pytest.raises(
        (ValueError, OSError), match=r"--output .*(as CSV or Parquet|part of a model|folder)"
    ):
        check_table_name(tmp_path / name)


def test_a_slow_reader_gets_every_byte_though_python_does_not_buffer():
    """0.1.0 wrote 69,632 of 5,515,021 bytes with PYTHONUNBUFFERED=1, and exit code 0."""
    script = "from fisherfold.tables.writers import write_standard_output as w; w(bytes(3_000_000))"
    with subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        size = 0
        while part := process.stdout.read(50_000):
            size += len(part)
    assert (size, process.returncode) == (3_000_000, 0)
