"""Parts of the theory kept as files, so that a part that is there is not measured again.

A record holds everything of a part but its picture, which lies beside it; it counts only for the same version, size,
seeds and device. Several parts can be measured at a time, each by a process of its own, which leaves its record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import finite
from fisherfold.reproduce.theory import PARTS, run_theory
from fisherfold.reproduce.theory.report import Finding, Part, Settings, summary, write_part
from fisherfold.reproduce.workers import Workers

Tick = Callable[[int, int], None]


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
    if unknown := sorted(set(only) - set(PARTS)):
        raise ValueError(f"part must be one of {list(PARTS)}, got {unknown}")
    make_folder(folder)
    names = [name for name in PARTS if not only or name in only]
    known = _recorded(folder, settings)
    missing = [name for name in names if fresh or name not in known]
    done = len(names) - len(missing)
    tick(done, len(names))
    if jobs > 1 and len(missing) > 1:
        silent = replace(settings, say=_nothing)
        with Workers(min(jobs, len(missing))) as workers:
            for count, name in enumerate(workers.each(partial(_measure, silent, folder), missing), start=1):
                settings.say(f"theory: {name} done")
                tick(done + count, len(names))
    else:
        for count, name in enumerate(missing, start=1):
            _measure(settings, folder, name)
            tick(done + count, len(names))
    found = _recorded(folder, settings)
    return [found[name] for name in names if name in found]


def write_summary(folder: Path) -> dict[str, str]:
    """Write ``theory.json``: the findings of all parts that are recorded, and how each was run.

    A part that is run alone leaves the findings of the others there.
    """
    found = {name: record for name in PARTS if (record := _read(folder, name)) is not None}
    content = summary([part for _, part in found.values()])
    content["settings"] = {name: identity for name, (identity, _) in found.items()}
    target = folder / "theory.json"
    text = json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(target, text.encode())
    return {target.name: str(target)}


def _recorded(folder: Path, settings: Settings) -> dict[str, Part]:
    """The parts that were run with these settings, by name."""
    found = {name: _read(folder, name) for name in PARTS}
    return {name: each[1] for name, each in found.items() if each is not None and each[0] == _identity(settings)}


def _measure(settings: Settings, folder: Path, name: str) -> str:
    """Run a part and leave its picture, table and record."""
    (part,) = run_theory(settings, only=(name,))
    write_part(part, folder)
    content = {"identity": _identity(settings), "part": _plain(part)}
    write_atomically(_file(folder, name), json.dumps(content, ensure_ascii=False, default=float).encode())
    return name


def _nothing(_: str) -> None:
    """Other processes are silent."""


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.part.json"


def _identity(settings: Settings) -> dict[str, Any]:
    return {"version": __version__, "quick": settings.quick, "seeds": settings.seeds, "device": settings.device}


def _plain(part: Part) -> dict[str, Any]:
    findings = [asdict(finding) for finding in part.findings]
    return {
        "name": part.name, "title": part.title, "sentence": part.sentence, "findings": findings, "table": part.table,
    }  # fmt: skip


def _read(folder: Path, name: str) -> tuple[dict[str, Any], Part] | None:
    """A recorded part and how it was run."""
    file = _file(folder, name)
    if not file.is_file() or not (folder / f"{name}.png").is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        stored, identity = content["part"], dict(content["identity"])
        findings = [Finding(**finding) for finding in stored.pop("findings")]
        return identity, Part(**stored, findings=findings, figure=None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # from a copy that was cut short, for example: it is measured again
