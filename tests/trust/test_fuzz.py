"""The loaders and readers on the corpus, on every input that ever broke one, and on some mutations."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from fisherfold.completion import MatrixCompletion
from toy import slow

sys.path.insert(0, str(Path(__file__).parents[2] / "fuzz"))
from targets import CORPUS, TARGETS, mutation, seeds  # isort: skip

SEEDS = [f"{name}/{path.name}" for name in TARGETS for path in sorted((CORPUS / name).iterdir())]


def test_every_target_has_seeds():
    assert {p.name for p in CORPUS.iterdir()} == set(TARGETS)
    assert {seed.partition("/")[0] for seed in SEEDS} == set(TARGETS)


@pytest.mark.parametrize("seed", SEEDS)
def test_corpus(seed):
    TARGETS[seed.partition("/")[0]]((CORPUS / seed).read_bytes())


@pytest.mark.parametrize("name", ["small", "point"])
def test_the_models_of_the_corpus_are_models(name, tmp_path):
    """A change of the format would else leave the fuzzer with files that are rejected at once."""
    (tmp_path / "model.safetensors").write_bytes(
        (CORPUS / "completion" / f"{name}.safetensors").read_bytes()
    )
    MatrixCompletion.load(tmp_path)


@pytest.mark.parametrize("count", [60, *slow(3000)])
@pytest.mark.parametrize("name", list(TARGETS))
def test_mutations(name, count):
    chance, corpus = random.Random(count), seeds(name)
    for _ in range(count // 20 if name == "parquet" else count):  # each starts a process
        TARGETS[name](mutation(chance, corpus))
