"""Mutate the corpus of every fuzz target for some minutes; needs nothing but fisherfold.

    python fuzz/run.py --minutes 5

An input that breaks a target is written to ``fuzz/crash-TARGET-...``; add it to
``tests/corpus/TARGET`` with the fix. An input with an answer that no other one had becomes a seed,
and is kept in ``fuzz/grown/TARGET`` for the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from targets import TARGETS, mutation, outcome, seeds

GROWN = Path(__file__).parent / "grown"


@contextlib.contextmanager
def no_standard_error():
    """Without what polars prints of the errors that it raises."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    failures = 0
    for name in TARGETS:
        corpus = seeds(name, GROWN)
        known: set[str] = set()
        with no_standard_error():
            for content in corpus:
                known.add(outcome(name, content))
        count = 0
        end = time.monotonic() + options.minutes * 60 / len(TARGETS)
        while time.monotonic() < end:
            content = mutation(chance, corpus)
            try:
                with no_standard_error():
                    answer = outcome(name, content)
                if answer not in known:
                    known.add(answer)
                    corpus.append(content)
                    (GROWN / name).mkdir(parents=True, exist_ok=True)
                    (GROWN / name / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
            except Exception as error:
                file = (
                    Path(__file__).parent
                    / f"crash-{name}-{hashlib.sha256(content).hexdigest()[:12]}"
                )
                file.write_bytes(content)
                failures += 1
                print(
                    f"{name}: {type(error).__name__}: {str(error)[:200]}; input in {file}",
                    flush=True,
                )
            count += 1
        print(f"{name}: {count:,} inputs, {len(known)} different answers", flush=True)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
