"""Write or check requirements.lock.

Every package that fisherfold runs on, pinned and with the hash of its file.

    python .ci/lock.py           # write it anew, from the versions of constraints.txt
    python .ci/lock.py --check   # CI: is it what pyproject.toml and constraints.txt lead to?

The hashes are those of the files for this CPython and platform (the CPU build of torch); ``pip
install --require-hashes -r requirements.lock`` then refuses a file that was changed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
GPU_PARTS = ("nvidia-", "cuda-", "triton")  # of other builds of torch
# named by torch, used by its compiler alone; whichever version an environment has will do for the
# tests
LOCK_ONLY = {"setuptools": "84.2.1"}


def pinned() -> dict[str, str]:
    """The versions of constraints.txt by name."""
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return LOCK_ONLY | {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins
    }


def wanted() -> dict[str, str]:
    """What the package needs at run time, with all that needs in turn, at the pinned versions."""
    import tomllib  # not in Python 3.10, where main ends before

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = pinned()
    found = {}
    queue = list(project["dependencies"])
    while queue:
        need = Requirement(queue.pop())
        name = canonicalize_name(need.name)
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        if name in found or name.startswith(GPU_PARTS) or not applies:
            continue
        try:
            queue += requires(name) or []
        except PackageNotFoundError:
            continue  # a part of torch that this platform's build does not come with
        if name not in versions:
            raise SystemExit(f"constraints.txt does not pin {name}, which {project['name']} needs")
        if not need.specifier.contains(versions[name], prereleases=True):
            raise SystemExit(f"constraints.txt pins {name} {versions[name]}, {need} is needed")
        found[name] = versions[name]
    return dict(sorted(found.items()))


def written() -> dict[str, str]:
    """What the lock file names, each with at least one hash."""
    entry = re.compile(
        r"^([\w.-]+)==(\S+) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE
    )
    return dict(entry.findall(LOCK.read_text()))


def hashes(name: str, version: str) -> list[str]:
    """The hash of the file that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            folder,
            f"{name}=={version}",
        ]
        subprocess.run(command, check=True)
        return [
            hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())
        ]


def main() -> None:
    """Write the lock file, or check it."""
    if sys.version_info < (3, 11):
        print("requirements.lock: not looked at, since many of its versions need Python 3.11")
        return
    need = wanted()
    if "--check" in sys.argv:
        have = written()
        if have != need:
            off = sorted(name for name in {*have, *need} if have.get(name) != need.get(name))
            raise SystemExit(
                f"requirements.lock is out of date for {', '.join(off)}: run python .ci/lock.py"
            )
        print(
            f"requirements.lock: {len(have)} packages, each pinned and hashed, as pyproject.toml "
            "needs them"
        )
        return
    text = "# Written by .ci/lock.py: what fisherfold runs on; CPython 3.11 on Linux x86-64, "
    text += "the CPU build of torch.\n"
    for name, version in need.items():
        text += (
            f"{name}=={version} \\\n"
            + " \\\n".join(f"    --hash=sha256:{h}" for h in hashes(name, version))
            + "\n"
        )
    LOCK.write_text(text)


if __name__ == "__main__":
    main()
