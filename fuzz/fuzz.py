"""Fuzz one loader with coverage guidance; needs atheris (``pip install atheris``).

    python fuzz/fuzz.py csv -max_total_time=600
    python fuzz/fuzz.py completion tests/corpus/completion -runs=100000

The target is the first word; see ``fuzz/targets.py``. Everything after it goes to libFuzzer; if no
corpus folder is named, a temporary copy of the target's own is used. A crash is written beside as
``crash-...``: add it to ``tests/corpus/<target>`` together with the fix.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "fuzz"), str(ROOT / "src")]

with atheris.instrument_imports(
    include=["fisherfold.files", "fisherfold.tables", "fisherfold.completion"]
):
    from targets import TARGETS


def main() -> None:
    """Run libFuzzer on the named target."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(
            f"usage: python fuzz/fuzz.py {{{','.join(TARGETS)}}} [corpus folder] [libFuzzer "
            "options]"
        )
    name = sys.argv.pop(1)
    if not any(not word.startswith("-") for word in sys.argv[1:]):
        copy = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-")) / name
        shutil.copytree(ROOT / "tests" / "corpus" / name, copy)
        sys.argv.insert(1, str(copy))
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
