"""Parts of the theory kept in ``theory.json``, so that a part that is there is not measured again.

The picture and the table of a part lie beside it. A record counts only for the same version, size, seeds and device.
Several parts can be measured at a time, each by a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import finite
from fisherfold.reproduce.theory import PARTS, chosen, run_theory
from fisherfold.reproduce.theory.report import Finding, Part, Settings, files_of, summary, write_part
from fisherfold.reproduce.workers import Workers

Tick = Callable[[int, int], None]
SUMMARY = "theory.json"


def run_recorded(
    settings: Settings,
    folder: Path,
    *,
    only: Sequence[str] = (),
    fresh: bool = False,
    jobs: int = 1,
    tick: Tick = lambda _done, _total: None,
) -> list[Part]:
    """Run the parts that are not recorded yet, and record each as it is done."""
    names = chosen(only)
    make_folder(folder)
    identity = {"version": __version__, "quick": settings.quick, "seeds": settings.seeds, "device": settings.device}
    found = read_records(folder)
    missing = [name for name in names if fresh or name not in found or found[name][0] != identity]
    done = len(names) - len(missing)
    tick(done, len(names))
    with Workers(max(1, min(jobs, len(missing)))) as workers:
        if jobs > 1 and len(missing) > 1:
            measured = workers.each(partial(_measure, replace(settings, say=_nothing), folder), missing)
        else:
            measured = ((name, _measure(settings, folder, name)) for name in missing)
        for count, (name, part) in enumerate(measured, start=1):
            found[name] = identity, part
            _write(found, folder)
            tick(done + count, len(names))
    return [found[name][1] for name in names]


def read_records(folder: Path) -> dict[str, tuple[dict[str, Any], Part]]:
    """How each recorded part was run, and the part; a file that was cut short holds none."""
    found: dict[str, tuple[dict[str, Any], Part]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads((folder / SUMMARY).read_bytes())
        for name, identity in content["settings"].items():
            rows = [{k: v for k, v in row.items() if k != "part"} for row in content["results"] if row["part"] == name]
            findings = [Finding(**row) for row in rows]
            if all(file.is_file() for file in files_of(name, folder).values()):
                found[name] = identity, Part(name, content["titles"][name], content["sentences"][name], findings)
    return found


def _write(found: dict[str, tuple[dict[str, Any], Part]], folder: Path) -> None:
    """Write the findings of all parts, and how each was run."""
    ordered = {name: found[name] for name in PARTS if name in found}
    content = summary([part for _, part in ordered.values()])
    content["titles"] = {name: part.title for name, (_, part) in ordered.items()}
    content["settings"] = {name: identity for name, (identity, _) in ordered.items()}
    text = json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False, default=float)
    write_atomically(folder / SUMMARY, text.encode())


def _measure(settings: Settings, folder: Path, name: str) -> Part:
    """Run a part and leave its picture and table."""
    (part,) = run_theory(settings, only=(name,))
    write_part(part, folder)
    return replace(part, table=[], figure=None)


def _nothing(_: str) -> None:
    """Other processes are silent."""
