"""Print what ``coverage json`` has measured: a line per package, and the modules below 90 %.

python .ci/coverage_table.py build/coverage.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

ENOUGH = 90.0  # percent of lines and branches


def share(counts: list[int]) -> float:
    """Percent of what can be reached."""
    reached, all_ = counts
    return 100.0 * reached / all_ if all_ else 100.0


def main() -> None:
    """Print the table of packages, and the modules that are below."""
    files = json.loads(Path(sys.argv[1]).read_text())["files"]
    packages: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    below = []
    for name, found in sorted(files.items()):
        parts = Path(name).parts
        inside = parts[parts.index("fisherfold") + 1 :]
        summary = found["summary"]
        counts = [
            summary["covered_lines"] + summary["covered_branches"],
            summary["num_statements"] + summary["num_branches"],
        ]
        package = packages[inside[0] if len(inside) > 1 else "(top level)"]
        package[0] += counts[0]
        package[1] += counts[1]
        if share(counts) < ENOUGH:
            lines = ", ".join(map(str, found["missing_lines"][:12]))
            below.append(f"{'/'.join(inside):40} {share(counts):5.1f} %  {lines}")
    for name, counts in sorted(packages.items()):
        print(f"{name:40} {share(counts):5.1f} %")
    total = [sum(column) for column in zip(*packages.values(), strict=True)]
    print(f"{'all':40} {share(total):5.1f} %")
    print(f"\nmodules below {ENOUGH:g} %, with the first lines that are not reached:")
    print("\n".join(below) or "none")


if __name__ == "__main__":
    main()
