"""Print a table of sizes by package.

    python .ci/size.py                    # of the files here
    python .ci/size.py --since 05eb6d7    # beside those of a commit, formatted as ruff does today

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
    parser.add_argument("--since", help="a commit, formatted before it is counted")
    given = parser.parse_args()
    show(count(ROOT), count_at(given.since) if given.since else None)


def count_at(commit: str) -> dict[str, Counter[str]]:
    """Count what is in the files of a commit, formatted at 100 columns."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        ruff = [sys.executable, "-m", "ruff", "format", "-q", "--line-length", "100", "--isolated"]
        subprocess.run([*ruff, *FOLDERS], cwd=folder, check=False)
        return count(Path(folder))


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


def show(now: dict[str, Counter[str]], before: dict[str, Counter[str]] | None) -> None:
    """Print the table in Markdown, with what was before on the left of the arrows."""
    columns = ("modules", "lines", "comments", "over 100", "fmt: skip", "tuples")
    print("| package | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    after = with_total(now)
    old = with_total(before or {})
    for name, seen in after.items():
        cells = []
        for column in columns:
            past = f"{old[name][column]:,}" if name in old else "–"
            cells.append(f"{past} → {seen[column]:,}" if before else f"{seen[column]:,}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def with_total(found: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """The packages by name, their sum, and the folders outside of src."""
    outside = [folder for folder in FOLDERS if "/" not in folder]
    rows = {name: found[name] for name in sorted(found) if name not in outside}
    rows["**all of src**"] = sum(rows.values(), Counter())
    return rows | {name: found[name] for name in outside if name in found}


if __name__ == "__main__":
    main()
