"""Hostile model and checkpoint files: refused with a reason, without pickle and without allocating what they claim."""

from __future__ import annotations

import ast
import json
import os
import pickle
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save

import fisherfold
from fisherfold import Gaussian, NLLProblem, minimize
from fisherfold.completion import MatrixCompletion
from fisherfold.files import HEADER, HEADER_LIMIT, read_tensors
from fisherfold.files import signature as _signature
from fisherfold.manifolds import Sphere
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
from toy import slow


def signed(tensors, content):
    """A file with a right checksum, whatever it says: the work of an attacker who knows the format."""
    text = json.dumps(content | {"sha256": _signature(tensors, content)})
    return save(tensors, metadata={HEADER: text})


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def parts(path):
    """The tensors and the whole JSON of a file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    said = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][HEADER])
    said.pop("sha256")
    tensors, _ = read_tensors(path, kind=said["kind"], version=said["version"])
    return tensors, said


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One saved model of each estimator, and how to load and use it."""
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    X = np.array([(f"u{i}", f"i{j}") for i in range(8) for j in range(6)], dtype=object)
    MatrixCompletion(rank=2, max_iter=4).fit(X, rng.normal(size=48)).save(folder / "completion")
    known = pl.DataFrame(
        {"row": [f"u{i}" for i in range(9)], "age": rng.normal(size=9), "kind": list("abcabcabc")}
    )
    extras = {"row_features": known, "time": np.arange(48) * 86400}
    everything = MatrixCompletion(rank=2, max_iter=4, likelihood="ordered").fit(
        X, rng.integers(1, 6, 48), **extras
    )
    everything.save(folder / "everything")
    Z, y, task = rng.normal(size=(60, 3)), rng.normal(size=60), np.arange(60) % 4
    SubspaceRegressor(2, max_iter=4).fit(Z, y, task=task).save(folder / "regression")
    SubspaceClassifier(2, ridge=1.0, max_iter=4).fit(Z, y > 0, task=task).save(folder / "classes")
    return {
        "completion": (folder / "completion", MatrixCompletion),
        "everything": (folder / "everything", MatrixCompletion),
        "regression": (folder / "regression", SubspaceRegressor),
        "classes": (folder / "classes", SubspaceClassifier),
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "damaged"),
        (b"\x00" * 7, "damaged"),
        (
            struct.pack("<Q", 2**63) + b"{}",
            "claims a header of 9,223,372,036,854,775,808 bytes, 10 are possible",
        ),
        (raw(b"{" * 5000), "damaged"),
        (
            raw({"a": {"dtype": "F64", "shape": [2**40, 2**20], "data_offsets": [0, 2**63]}}),
            "damaged",
        ),
        (
            raw(
                {"a": {"dtype": "F64", "shape": [10**9], "data_offsets": [0, 8 * 10**9]}},
                b"\0" * 64,
            ),
            "damaged",
        ),
        (
            raw(
                {
                    "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                    "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
                },
                b"\0" * 24,
            ),
            "is not a thing file",
        ),
        (
            raw({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 4),
            "is not a thing file",
        ),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"\0" * 4), "damaged"),
        (
            raw({"a": {"dtype": "EVIL", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
            "is not a thing file",
        ),
        (
            raw({"__metadata__": {HEADER: '{"kind": "thing", "version": ' + "9" * 5000 + "}"}}),
            "damaged",
        ),
        (raw({"__metadata__": {HEADER: "[" * 100_000}}), "nested too deeply"),
        (
            raw(
                {
                    "__metadata__": {
                        HEADER: '{"kind": "thing", "version": 1, "header": '
                        + "[" * 900
                        + "]" * 900
                        + "}"
                    }
                }
            ),
            "damaged|nested",
        ),
        (raw({"__metadata__": {HEADER: '{"kind": "thing", "version": true}'}}), "version True"),
        (raw({"__metadata__": {HEADER: '{"kind": "thing", "version": 0}'}}), "version 0"),
        (
            raw({"__metadata__": {HEADER: '{"kind": "thing", "version": 99}'}}),
            "version 99 .* at most 1 is known",
        ),
        (
            raw({"__metadata__": {HEADER: '{"kind": ["thing"], "version": 1}'}}),
            "is not a thing file",
        ),
        (b"\x80\x04\x95" + pickle.dumps(os.getcwd), "damaged"),
        (b"PK\x03\x04 a torch.save archive", "damaged"),
    ],
)
def test_headers_that_lie(tmp_path, content, reason):
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as refusal:
        read_tensors(path, kind="thing", version=1)
    assert str(path) in str(refusal.value)


def test_types_that_nobody_writes_are_refused(tmp_path):
    tensors = {"a": torch.zeros(2, dtype=torch.complex64)}
    (tmp_path / "f").write_bytes(signed(tensors, {"kind": "thing", "version": 1, "header": {}}))
    with pytest.raises(ValueError, match="its tensor 'a' has the type C64"):
        read_tensors(tmp_path / "f", kind="thing", version=1)


CHECK = """
import resource, sys
from fisherfold.files import read_tensors
room = 700 * 2**20
import torch
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
for path in sys.argv[1:]:
    try:
        read_tensors(path, kind="thing", version=1)
    except ValueError as error:
        print("refused:", error)
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads the size of a process from /proc"
)
def test_claims_are_not_allocated(tmp_path):
    """A petabyte of holes, and eight gigabytes claimed by 64 bytes, in a process that may take 700 MiB."""
    claim = raw({"a": {"dtype": "F64", "shape": [10**9], "data_offsets": [0, 8 * 10**9]}})
    (tmp_path / "claim").write_bytes(claim + b"\0" * 64)
    huge = 2**43
    header = raw({"a": {"dtype": "U8", "shape": [huge], "data_offsets": [0, huge]}})
    with (tmp_path / "holes").open("wb") as file:
        file.write(header)
        try:
            file.truncate(len(header) + huge)
        except OSError:
            pytest.skip("this file system has no holes of that size")
    home = str(Path(fisherfold.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path / "claim"), str(tmp_path / "holes")],
        env={**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    first, second = done.stdout.splitlines()
    assert first.startswith("refused:")
    assert "more than the" in second


def test_a_header_beyond_the_limit_is_not_parsed(tmp_path):
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2 * HEADER_LIMIT + 1))
        file.truncate(3 * HEADER_LIMIT)
    with pytest.raises(ValueError, match=r"claims a header of 33,554,433 bytes"):
        read_tensors(path, kind="thing", version=1)


def test_no_load_unpickles(models, tmp_path, monkeypatch):
    """Every way to read a model or checkpoint, with all of pickle and torch.load out of order."""

    def refuse(*args, **options):
        raise AssertionError("a load path reached pickle")

    problem, start = sphere()
    minimize(problem, start, max_iter=2, checkpoint=tmp_path / "c")
    for owner, name in (
        (pickle, "loads"),
        (pickle, "load"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    for folder, cls in models.values():
        cls.load(folder)
    minimize(problem, start, max_iter=4, checkpoint=tmp_path / "c", resume=True)


FORBIDDEN = {
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "torch.jit.load",
    "joblib.load",
    "dill.load",
    "marshal.loads",
    "yaml.load",
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "np.fromfile",
    "shelve.open",
}


def test_no_source_file_calls_what_executes_or_unpickles():
    """No load path, that of the official CIFAR archives included, reads a pickle."""
    home, cifar = (
        Path(fisherfold.__file__).parent,
        Path(__file__).parents[2] / "benchmarks" / "cifar" / "data.py",
    )
    for file in (*home.rglob("*.py"), cifar):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name not in FORBIDDEN, f"{file}:{node.lineno} calls {name}"
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert words.get("shell", "False") == "False", f"{file}:{node.lineno}"
            if name in {"np.load", "numpy.load"}:
                assert words.get("allow_pickle") == "False", f"{file}:{node.lineno}"


def sphere():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=g, dtype=torch.float64)
    w = Sphere(4).random_point(generator=g)
    problem = NLLProblem(
        Sphere(4), lambda x, w: torch.tanh(x @ w), Gaussian(), x, torch.tanh(x @ w)
    )
    return problem, Sphere(4).random_point(generator=g)


draws = pytest.mark.parametrize("share", [0.05, *slow(1.0)])


def drawn(changes, share):
    """A share of the changes, the same ones in every run."""
    chance = random.Random(0)
    return (change for change in changes if chance.random() < share)


def every_change(tensors, said):
    """Each tensor and each number of a file, replaced by something hostile; the checksum is right every time."""
    for name in tensors:
        without = {k: v for k, v in tensors.items() if k != name}
        yield f"no {name}", without, said
        tensor = tensors[name]
        yield f"{name} longer", tensors | {name: torch.cat([tensor, tensor[:1]])}, said
        yield f"{name} flat", tensors | {name: tensor.reshape(-1)[:1].clone()}, said
        yield f"{name} deep", tensors | {name: tensor[None]}, said
        if tensor.is_floating_point():
            yield f"{name} nan", tensors | {name: torch.full_like(tensor, float("nan"))}, said
            yield f"{name} inf", tensors | {name: torch.full_like(tensor, float("inf"))}, said
            yield f"{name} half", tensors | {name: tensor.half()}, said
            most, least = (
                min(torch.finfo(tensor.dtype).max, 1e300),
                torch.finfo(tensor.dtype).tiny / 64,
            )
            for value in (most, -most, most**0.5, -(most**0.5), least, -least, 0.0, -1.0):
                yield f"{name} {value:g}", tensors | {name: torch.full_like(tensor, value)}, said
        else:
            yield f"{name} negative", tensors | {name: torch.full_like(tensor, -1)}, said
            yield (
                f"{name} large",
                tensors | {name: torch.full_like(tensor, torch.iinfo(tensor.dtype).max)},
                said,
            )
            yield f"{name} float", tensors | {name: tensor.double()}, said
    for what, header in every_table(said["header"]):
        yield what, tensors, said | {"header": header}


def every_table(table):
    """A table of JSON with each of its values, and those of the tables inside, left out or replaced."""
    for key, held in table.items():
        without = {k: v for k, v in table.items() if k != key}
        yield f"no {key}", without
        for value in (
            None,
            -1,
            0,
            1,
            2**70,
            1e308,
            -1e300,
            1e-300,
            "../../x",
            [],
            {},
            [[]],
            {"__class__": "x"},
            True,
        ):
            if value != held:
                yield f"{key} is {value!r}", without | {key: value}
        for what, inner in every_table(held) if isinstance(held, dict) else ():
            yield f"{key}: {what}", without | {key: inner}


@draws
@pytest.mark.parametrize("name", ["completion", "everything", "regression", "classes"])
def test_every_part_of_a_model_is_checked(models, tmp_path, name, share):
    """With a right checksum: a model that loads has finite predictions; one that does not names the file."""
    folder, cls = models[name]
    tensors, said = parts(folder / "model.safetensors")
    file = tmp_path / "model.safetensors"
    refused = loaded = 0
    for what, changed, content in drawn(every_change(tensors, said), share):
        file.write_bytes(signed(changed, content))
        said = refusal(cls.load, tmp_path)
        assert said is None or str(tmp_path) in said, what
        refused += said is not None
        if said is None:
            loaded += 1
            use(cls.load(tmp_path), what)
    assert refused > (2 if share == 1.0 else 1) * loaded, (refused, loaded)


def refusal(function, *args, **options):
    """What a ValueError says; None if all went well."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return None


def use(model, what):
    """Predict for known and new members; numbers must be finite."""
    with np.errstate(all="raise", under="ignore"):
        if isinstance(model, MatrixCompletion):
            pairs = np.array(
                [("u1", "i1"), ("new", "i2"), ("u2", "new"), ("new", "new")], dtype=object
            )
            found = model.predict(pairs, return_std=True)
            model.recommend("u1", 3, exclude_seen=False)
        elif isinstance(model, SubspaceRegressor):
            X = np.concatenate([np.zeros((2, 3)), np.ones((2, 3)), model.scaling_.center[None]])
            found = model.predict(X, task=[0, 1, 2, 1, 0], return_std=True)
        else:
            found = [model.predict_proba(np.ones((2, 3)), task=[0, 1])]
    assert all(np.isfinite(part).all() for part in found), what


def test_attributes_cannot_be_planted(models, tmp_path):
    folder, cls = models["regression"]
    tensors, said = parts(folder / "model.safetensors")
    header = said["header"] | {"params": {**said["header"]["params"], "__class__": 1}}
    (tmp_path / "model.safetensors").write_bytes(signed(tensors, said | {"header": header}))
    with pytest.raises(ValueError, match="is damaged or not a subspace file"):
        cls.load(tmp_path)


def test_names_of_tensors_are_never_paths(tmp_path):
    """Names with path tricks are names; nothing appears beside the file."""
    tensors = {
        "../../escape": torch.ones(2),
        "/etc/passwd": torch.ones(1),
        "a\0b": torch.ones(1),
        "": torch.ones(1),
    }
    (tmp_path / "f").write_bytes(signed(tensors, {"kind": "thing", "version": 1, "header": {}}))
    found, _ = read_tensors(tmp_path / "f", kind="thing", version=1)
    assert set(found) == set(tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@draws
def test_every_part_of_a_checkpoint_is_checked(tmp_path, share):
    problem, start = sphere()
    path = tmp_path / "c"
    minimize(problem, start, max_iter=2, checkpoint=path)
    tensors, said = parts(path)
    refused = loaded = 0
    for what, changed, content in drawn(every_change(tensors, said), share):
        if what.startswith("numbers: "):
            continue  # of the solver: a forged step is a bad step
        path.write_bytes(signed(changed, content))
        said = refusal(minimize, problem, start, max_iter=3, checkpoint=path, resume=True)
        assert said is None or str(path) in said, what
        refused, loaded = refused + (said is not None), loaded + (said is None)
    assert refused > loaded
