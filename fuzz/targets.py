"""What is fuzzed: a target takes any bytes and answers or raises a clear ValueError.

``make fuzz`` runs all of them for five minutes (``fuzz/run.py``), ``fuzz/fuzz.py`` one of them
guided by coverage, and ``tests/trust/test_fuzz.py`` the corpus and a few mutations.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

from fisherfold.completion import MatrixCompletion
from fisherfold.files import HEADER, parse_json, signature
from fisherfold.solvers.state import State
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
from fisherfold.tables import readers

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
_FOLDER = Path(tempfile.mkdtemp(prefix="fisherfold-fuzz-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


_answers: list[str] = []  # of the target that runs


@contextlib.contextmanager
def sentence():
    """The only way to fail: a ValueError with a message."""
    said = "nothing went wrong"
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    except ValueError as error:
        said = str(error)
    assert said.strip()
    _answers.append(said)


def outcome(name: str, content: bytes) -> str:
    """Run a target; what it answered, without the numbers and names in it."""
    _answers.clear()
    TARGETS[name](content)
    return re.sub(r"'[^']*'|/\S*|[\d.,]+", "", " | ".join(_answers))


def _write(content: bytes, name: str) -> Path:
    path = _FOLDER / name
    path.write_bytes(content)
    return path


def completion(content: bytes) -> None:
    """A completion model; one that loads must predict finite values."""
    folder = _write(content, "model.safetensors").parent
    with sentence():
        model = MatrixCompletion.load(folder)
        row = model.model_.row_ids.labels[0]
        column = model.model_.column_ids.labels[0]
        assert np.isfinite(model.predict(np.array([[row, column]], dtype=object))).all()


def subspace(content: bytes) -> None:
    """A multi-task model; one that loads must predict."""
    folder = _write(content, "model.safetensors").parent
    for kind in (SubspaceRegressor, SubspaceClassifier):
        with sentence():
            model = kind.load(folder)
            features = np.zeros((1, model.n_features_in_))
            model.predict(features, task=model.task_ids_[:1] if len(model.task_ids_) > 1 else None)


def checkpoint(content: bytes) -> None:
    """A checkpoint of a solver."""
    with sentence():
        State.load(
            _write(content, "checkpoint"), method="rngd", like=torch.zeros(4, dtype=torch.float64)
        )


def header(content: bytes) -> None:
    """A completion model with a right checksum and a changed header.

    The bytes are what the JSON says.
    """
    try:
        said = parse_json(content.decode("utf-8", errors="replace"))
    except ValueError:
        return
    from safetensors.torch import load, save

    tensors = load((CORPUS / "completion" / "small.safetensors").read_bytes())
    document = {"kind": "completion", "version": 1, "header": said}
    signed = json.dumps(document | {"sha256": signature(tensors, document)})
    completion(save(tensors, metadata={HEADER: signed}))


def _table(content: bytes, name: str) -> None:
    path = _write(content, name)
    for skip in (False, True):
        with sentence():
            table = readers.read_ratings(path, max_bytes=2**22, skip_bad_lines=skip)
            assert np.isfinite(table.values).all()
            assert table.n_lines == sum(table.rejected.values()) + len(table.values)
            assert len(table.rows) == len(table.columns) == len(table.values) > 0
            assert skip or sum(table.rejected.values()) <= 0.01 * table.n_lines
    with sentence():
        table, rows, columns = readers.read_pairs(path, max_bytes=2**22)
        assert len(rows) == len(columns) == table.frame.height
    with sentence():
        table = readers.read_table(path, header=True, max_bytes=2**22)
        for name in table.frame.columns:
            with sentence():
                readers.numbers(table.frame[name], ",")
            with sentence():
                readers.ids(table.frame[name])


def csv(content: bytes) -> None:
    """A comma-separated table, packed or not."""
    _table(content, "t.csv")


def dat(content: bytes) -> None:
    """A table with ``::``."""
    _table(content, "t.dat")


def parquet(content: bytes) -> None:
    """A Parquet table, which a process of its own decodes: once, since that takes a while."""
    path = _write(content, "t.parquet")
    with sentence():
        table = readers.read_ratings(path, max_bytes=2**22, skip_bad_lines=True)
        assert np.isfinite(table.values).all()
        assert len(table.rows) == len(table.columns) == len(table.values) > 0


TARGETS = {f.__name__: f for f in (completion, subspace, checkpoint, header, csv, dat, parquet)}
_PIECES = (
    b"\xff" * 8,
    b"\0" * 8,
    b'"',
    b"\n",
    b",",
    b"::",
    b"[",
    b"NaN",
    b"1e999",
    b"-1",
    b"\\u0000",
    b"\r",
    b";",
)


def seeds(name: str, *more: Path) -> list[bytes]:
    """The honest files of a target, every input that ever broke it, and those of other folders."""
    folders = [folder / name for folder in (CORPUS, *more) if (folder / name).is_dir()]
    return [path.read_bytes() for folder in folders for path in sorted(folder.iterdir())]


def mutation(chance: random.Random, corpus: list[bytes]) -> bytes:
    """A seed with up to four changes.

    Bytes replaced, removed, repeated, or a piece of another seed put in.
    """
    content = chance.choice(corpus)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(content))
        other = chance.choice(corpus)
        start = chance.randint(0, len(other))
        piece = chance.choice(
            [
                chance.randbytes(chance.randint(0, 8)),
                content[at : at + 16] * 3,
                chance.choice(_PIECES),
                other[start : start + 24],
            ]
        )
        content = content[:at] + piece + content[at + chance.choice([0, 1, 2, 4, 8, 40]) :]
    return content
