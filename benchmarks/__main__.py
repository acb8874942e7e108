"""List the benchmarks and run them.

    python -m benchmarks list                    what there is
    python -m benchmarks run NAME [options]      one benchmark; ``run NAME --help`` explains it
    python -m benchmarks run NAME --smoke        the same code in seconds, on tiny stand-in data
    python -m benchmarks run --all --smoke       all of them, each in a process of its own
    python -m benchmarks index [--check]         write (or compare) the table of the README

A benchmark is a module of this package with a line ``SMOKE = ...``: see benchmarks/README.md.
Everything runs on one thread unless OMP_NUM_THREADS or an option says otherwise.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import Missing, missing_module

HERE = Path(__file__).parent
README = HERE / "README.md"
FIELDS = ("Against", "Takes", "Page")
BEGIN = "<!-- the table is written by `python -m benchmarks index` -->\n"
END = "<!-- end of the table -->"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# the exit status when a peer or data is not there
MISSING = 2


@dataclass(frozen=True)
class Benchmark:
    """What a module says of itself, read without importing it."""

    name: str
    about: str
    against: str
    takes: str
    page: str


def benchmarks() -> dict[str, Benchmark]:
    """Return the modules with a line ``SMOKE = ...``, by name."""
    found = {}
    for path in sorted(HERE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
        if any(isinstance(target, ast.Name) and target.id == "SMOKE" for target in targets):
            name = ".".join(path.relative_to(HERE).with_suffix("").parts)
            found[name] = described(name, ast.get_docstring(tree) or "")
    return found


def described(name: str, text: str) -> Benchmark:
    """Read the first line and the fields of a docstring."""
    fields = {}
    for paragraph in text.split("\n\n"):
        for line in _joined(paragraph):
            key, _, value = line.partition(": ")
            if key in FIELDS:
                fields[key] = value
    lacking = [field for field in FIELDS if field not in fields]
    if lacking:
        raise SystemExit(f"the docstring of benchmarks.{name} has no line '{lacking[0]}: ...'")
    return Benchmark(name, text.splitlines()[0], *(fields[field] for field in FIELDS))


def _joined(paragraph: str) -> list[str]:
    """The lines of a paragraph of fields, each with the lines that continue it."""
    lines: list[str] = []
    for line in paragraph.splitlines():
        if lines and line.partition(": ")[0] not in FIELDS:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def run(name: str, given: list[str]) -> int:
    """Run one benchmark with the options after its name."""
    try:
        return _run(name, given)
    except Missing as error:
        print(f"{name}: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if not (advice := missing_module(error)):
            raise
        print(f"{name}: {advice}", file=sys.stderr)
    except FileNotFoundError as error:
        print(f"{name}: {error}", file=sys.stderr)
    return MISSING


def _run(name: str, given: list[str]) -> int:
    smoke = "--smoke" in given
    with tempfile.TemporaryDirectory() as folder:
        if smoke:
            from benchmarks._stand_in import write_data

            os.environ["FISHERFOLD_DATA"] = str(write_data(Path(folder) / "data"))
        module = importlib.import_module(f"benchmarks.{name}")
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks run {name}",
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--smoke", action="store_true", help="seconds, on stand-in data")
        module.options(parser)
        given = [option for option in given if option != "--smoke"]
        lines = (module.SMOKE,) if isinstance(module.SMOKE, str) else module.SMOKE
        for line in lines if smoke else ("",):
            module.main(parser.parse_args([*line.format(folder=folder).split(), *given]))
    return 0


def run_all(given: list[str]) -> int:
    """Run every benchmark in a process of its own, and say how each ended."""
    worst = 0
    for name in benchmarks():
        start = time.monotonic()
        command = [sys.executable, "-m", "benchmarks", "run", name, *given]
        status = subprocess.run(command, check=False, cwd=HERE.parent).returncode
        ended = {0: "ran", MISSING: "is missing something"}.get(status, f"failed ({status})")
        print(f"-- {name} {ended}, {time.monotonic() - start:.0f} s", flush=True)
        worst = max(worst, 0 if status == 0 else MISSING if status == MISSING else MISSING + 1)
    return worst


def table() -> str:
    """Return the table of the README."""
    lines = ["| name | measures | against | takes | page |", "|---|---|---|---|---|"]
    for found in benchmarks().values():
        page = found.page
        if page.startswith("docs/"):
            page = f"[{Path(page).stem}](../{page})"
        cells = (f"`{found.name}`", found.about.rstrip("."), found.against, found.takes, page)
        lines.append("| " + " | ".join(cell.rstrip(".") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def index(check: bool) -> int:
    """Write the table of the README, or say whether it is as it should be."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    new = before + BEGIN + table() + END + after
    if check:
        if new != text:
            print("benchmarks/README.md is old: run python -m benchmarks index", file=sys.stderr)
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


def main() -> int:
    """Read the command line."""
    for name in THREADS:
        os.environ.setdefault(name, "1")  # before NumPy and torch read them
    command, *rest = sys.argv[1:] or ["--help"]
    if command == "list":
        for found in benchmarks().values():
            print(f"{found.name:26} {found.about}")
        return 0
    if command == "index":
        return index("--check" in rest)
    if command == "run" and "--all" in rest:
        return run_all([option for option in rest if option != "--all"])
    if command == "run" and rest:
        if rest[0] in benchmarks():
            return run(rest[0], rest[1:])
        names = ", ".join(benchmarks())
        print(f"there is no benchmark {rest[0]!r}; the names are {names}", file=sys.stderr)
        return MISSING
    print((__doc__ or "").replace("``", "`"))
    return 0 if command in ("--help", "-h", "help") else MISSING


if __name__ == "__main__":
    sys.exit(main())
