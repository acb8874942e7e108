"""What is fuzzed: each target takes any bytes and may answer with a ValueError that is a sentence, or with a result.

``fuzz/fuzz.py`` runs the targets for as long as one likes; ``test_fuzz.py`` replays the corpus and a bounded number of
mutations of it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from fisherfold.cli.subspace import choose_features, read_rows, to_numbers
from fisherfold.completion import MatrixCompletion
from fisherfold.files import HEADER, parse_json
from fisherfold.files import signature as _signature
from fisherfold.solvers.state import State
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
from fisherfold.subspace.files import load_model
from fisherfold.tables.tables import read_pairs, read_ratings

_FOLDER = Path(tempfile.mkdtemp(prefix="fisherfold-fuzz-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


@contextlib.contextmanager
def sentence():
    """The only way to fail: a ValueError that says something in one line."""
    said = "nothing went wrong"
    try:
        yield
    except ValueError as error:
        said = str(error)
    assert said.strip()


def _write(content: bytes, name: str) -> Path:
    path = _FOLDER / name
    path.write_bytes(content)
    return path


def completion(content: bytes) -> None:
    """A completion model."""
    folder = _write(content, "model.safetensors").parent
    with sentence():
        model = MatrixCompletion.load(folder)
        labels = model.model_.row_ids.labels[:2], model.model_.column_ids.labels[:2]
        with np.errstate(all="ignore"):
            model.model_.predict(*model.model_.locate(labels[0][:1], labels[1][:1], "prior"))


def subspace(content: bytes) -> None:
    """A multi-task model."""
    with sentence():
        load_model(_write(content, "model.safetensors").parent, SubspaceRegressor, SubspaceClassifier)


def checkpoint(content: bytes) -> None:
    """A checkpoint of a solver."""
    with sentence():
        State.load(_write(content, "checkpoint"), method="rngd", like=torch.zeros(4, dtype=torch.float64))


def header(content: bytes) -> None:
    """A completion model with a right checksum and a changed header: the bytes are what the JSON says."""
    text = content.decode("utf-8", errors="replace")
    try:
        said = parse_json(text)
    except ValueError:
        return
    from safetensors.torch import load as load_tensors
    from safetensors.torch import save

    tensors = load_tensors((Path(__file__).parents[1] / "corpus" / "completion" / "small.safetensors").read_bytes())
    document = {"kind": "completion", "version": 1, "header": said}
    signed = json.dumps(document | {"sha256": _signature(tensors, document)})
    completion(save(tensors, metadata={HEADER: signed}))


def _table(content: bytes, name: str) -> None:
    path = _write(content, name)
    with sentence():
        table = read_ratings(path, max_bytes=2**22)
        assert np.isfinite(table.values).all()
        assert table.n_read == sum(table.refused.values()) + len(table.values)
        assert len(table.rows) == len(table.columns) == len(table.values)
    with sentence():
        read_pairs(path, text=(True, False), max_bytes=2**22)
    with sentence():
        rows = read_rows(path, max_bytes=2**22)
        target = rows.frame.columns[0]
        to_numbers(rows, choose_features(rows, target, None, None), target, None, decimal=".")


def csv(content: bytes) -> None:
    """A comma-separated table, packed or not."""
    _table(content, "t.csv")


def dat(content: bytes) -> None:
    """A table with ``::``."""
    _table(content, "t.dat")


def parquet(content: bytes) -> None:
    """A Parquet table."""
    _table(content, "t.parquet")


TARGETS = {f.__name__: f for f in (completion, subspace, checkpoint, header, csv, dat, parquet)}
