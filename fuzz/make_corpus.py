"""Write the seeds of the fuzzers into tests/corpus: one small honest file of every kind."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import torch

from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.completion import MatrixCompletion
from fisherfold.files import read_tensors
from fisherfold.manifolds import Sphere
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor

CORPUS = Path(__file__).parents[1] / "tests" / "corpus"
TABLES = {
    "plain.csv": b"user,item,rating\n1,2,3.5\n1,3,4\n2,2,1\n",
    "quoted.csv": 'user,item,rating\n"a\nb","c,d",1\n"say ""x""",é,2\n'.encode(),
    "ragged.csv": b'u,i,r\na,b,1\na,c,2,9\na,"d,3\n\nb\n,,\nb,c,inf\nb,c,nan\n',
    "bom.csv": b"\xef\xbb\xbfu;i;r\r\n1;2;3\r\n",
    "utf16.csv": "u,i,r\n1,2,3\n".encode("utf-16"),
    "latin.csv": "u,i,r\nMüller,x,1\n".encode("latin-1"),
    "packed.csv": gzip.compress(b"u,i,r\n1,2,3\n4,5,6\n", mtime=0),
    "mac.csv": b"u,i,r\r1,2,3\r",
    "plain.dat": b"1::1193::5::978300760\n1::661::3::978302109\n2::1::x::0\n",
    "odd.dat": b"u::i::r\n1::2\n::\n1::2::3::4\n\x1f::2::3\n",
}


def models() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        X = np.array([(f"u{i}", j) for i in range(5) for j in range(4)], dtype=object)
        MatrixCompletion(rank=1, max_iter=2).fit(X, rng.normal(size=20)).save(
            f"{folder}/completion"
        )
        _, said = read_tensors(
            Path(folder) / "completion" / "model.safetensors", kind="completion", version=2
        )
        keep(Path(folder) / "completion" / "model.safetensors", "completion/small.safetensors")
        write("header/small.json", json.dumps(said).encode())
        MatrixCompletion(rank=1, inference="point", ridge=1.0).fit(rng.normal(size=(4, 5))).save(
            f"{folder}/point"
        )
        keep(Path(folder) / "point" / "model.safetensors", "completion/point.safetensors")
        Z = rng.normal(size=(20, 2))
        y = rng.normal(size=20)
        task = np.arange(20) % 3
        SubspaceRegressor(1, max_iter=2).fit(Z, y, task=task).save(f"{folder}/regression")
        keep(Path(folder) / "regression" / "model.safetensors", "subspace/regression.safetensors")
        SubspaceClassifier(1, ridge=1.0, max_iter=2).fit(Z, y > 0, task=task).save(
            f"{folder}/classes"
        )
        keep(Path(folder) / "classes" / "model.safetensors", "subspace/classes.safetensors")
        g = torch.Generator().manual_seed(0)
        x = torch.randn(9, 4, generator=g, dtype=torch.float64)
        w = Sphere(4).random_point(generator=g)
        problem = NLLProblem(Sphere(4), lambda x, w: x @ w, Gaussian(), x, x @ w)
        minimize(problem, Sphere(4).random_point(generator=g), max_iter=2, checkpoint=f"{folder}/c")
        keep(Path(folder) / "c", "checkpoint/rngd-2.safetensors")


def keep(source: Path, name: str) -> None:
    write(name, source.read_bytes())


def write(name: str, content: bytes) -> None:
    path = CORPUS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main() -> None:
    models()
    for name, content in TABLES.items():
        write(f"{name.split('.')[1]}/{name}", content)
    for codec in ("zstd", "snappy", "uncompressed"):
        buffer = io.BytesIO()
        frame = pl.DataFrame(
            {"u": ["a", "b", None], "i": [1, 2, 3], "r": [1.5, None, 2.0], "l": [[1], [], [2]]}
        )
        frame.write_parquet(buffer, compression=codec)
        write(f"parquet/{codec}.parquet", buffer.getvalue())
    print(f"{sum(1 for p in CORPUS.rglob('*') if p.is_file())} seeds in {CORPUS}")


if __name__ == "__main__":
    main()
