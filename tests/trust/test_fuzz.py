"""The loaders and readers on the corpus, on every crash that was ever found, and on a bounded number of mutations."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fisherfold.completion import MatrixCompletion

CORPUS = Path(__file__).parents[1] / "corpus"
SEEDS = {name: sorted(p for p in (CORPUS / name).iterdir() if p.is_file()) for name in TARGETS}


def test_every_target_has_seeds():
    assert {p.name for p in CORPUS.iterdir()} == set(TARGETS)
    assert all(SEEDS.values())


@pytest.mark.parametrize("seed", [f"{name}/{path.name}" for name, paths in SEEDS.items() for path in paths])
def test_corpus(seed):
    TARGETS[seed.split("/")[0]]((CORPUS / seed).read_bytes())


@pytest.mark.parametrize("path", SEEDS["completion"], ids=lambda path: path.name)
def test_the_models_of_the_corpus_are_models(path, tmp_path):
    """A change of the format would else leave the fuzzer with files that are refused at the door."""
    (tmp_path / "model.safetensors").write_bytes(path.read_bytes())
    model = MatrixCompletion.load(tmp_path)
    assert len(model.model_.seen_values) == model.model_.posterior.n_ratings


@st.composite
def mutation(draw, seeds):
    """A seed with up to four changes: bytes replaced, removed, repeated, or a piece of another seed put in."""
    content = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 1, 2, 4, 8, 40]))
        other = draw(st.sampled_from(seeds))
        piece = draw(
            st.one_of(
                st.binary(max_size=8), st.just(content[at : at + 16] * 3),
                st.sampled_from([b"\xff" * 8, b"\0" * 8, b'"', b"\n", b",", b"[", b"NaN", b"1e999", b"-1", b'\\u0000']),
                st.integers(0, len(other)).map(lambda k, other=other: other[k : k + 24]),
            )
        )  # fmt: skip
        content = content[:at] + piece + content[at + length :]
    return content


@pytest.mark.parametrize("name", list(TARGETS))
def test_mutations(name):
    seeds = [path.read_bytes() for path in SEEDS[name]]

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(content=mutation(seeds))
    def run(content):
        TARGETS[name](content)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TARGETS))
def test_many_mutations(name):
    seeds = [path.read_bytes() for path in SEEDS[name]]

    @settings(max_examples=3000, suppress_health_check=list(HealthCheck))
    @given(content=mutation(seeds))
    def run(content):
        TARGETS[name](content)

    run()
