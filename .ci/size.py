"""Print a table of sizes by package.

    python .ci/size.py                   # of the files here
    python .ci/size.py --at v0.2.0       # of a commit, formatted as ruff formats them today

A tuple assignment is one of several values written out, ``a, b = 1, 2``; a swap counts too.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/fisherfold", "tests", "benchmarks", "examples", "fuzz")


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at", help="a commit, formatted before it is counted")
    given = parser.parse_args()
    if given.at is None:
        show(count(ROOT))
        return
    packed = subprocess.run(
        ["git", "archive", given.at], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        ruff = [sys.executable, "-m", "ruff", "format", "-q", "--line-length", "100", "--isolated"]
        subprocess.run([*ruff, *FOLDERS], cwd=folder, check=False)
        show(count(Path(folder)))


def count(root: Path) -> dict[str, Counter[str]]:
    """Count what is in the files of each package."""
    found: dict[str, Counter[str]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            parts = path.relative_to(root / folder).parts
            name = folder.partition("/")[0]
            if name == "src":
                name = parts[0] if len(parts) > 1 else "modules beside them"
            seen = found.setdefault(name, Counter())
            seen["modules"] += 1
            seen["lines"] += len(lines)
            seen["comments"] += sum(line.lstrip().startswith("#") for line in lines)
            seen["fmt: skip"] += sum("fmt: skip" in line or "fmt: off" in line for line in lines)
            seen["over 100"] += sum(len(line) > 100 for line in lines)
            seen["tuples"] += sum(is_tuple_assignment(node) for node in ast.walk(ast.parse(text)))
    return found


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether a statement assigns several written-out values at once."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def show(found: dict[str, Counter[str]]) -> None:
    """Print the table in Markdown."""
    outside = {folder for folder in FOLDERS if "/" not in folder}
    source = sum((seen for name, seen in found.items() if name not in outside), Counter())
    columns = ["modules", "lines", "comments", "over 100", "fmt: skip", "tuples"]
    print("| package | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    rows = {name: seen for name, seen in sorted(found.items()) if name not in outside}
    rows["**all of src**"] = source
    rows |= {name: seen for name, seen in found.items() if name in outside}
    for name, seen in rows.items():
        cells = [f"{seen[column]:,}" for column in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
