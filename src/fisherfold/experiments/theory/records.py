"""Parts of the theory kept as files, so that a part that is there is not measured again.

A record holds everything of a part but its picture, which lies beside it; it counts only for the same version, size,
seeds and device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fisherfold._version import __version__
from fisherfold.experiments.theory import PARTS, run_theory
from fisherfold.experiments.theory.report import Finding, Part, Settings, write_part
from fisherfold.files import write_atomically

Tick = Callable[[int, int], None]


def run_recorded(
    settings: Settings,
    folder: Path,
    *,
    only: Sequence[str] = (),
    fresh: bool = False,
    tick: Tick = lambda _done, _total: None,
) -> list[Part]:
    """Run the parts that are not recorded yet, and record each as it is done.

    Args:
        settings: how large, and where.
        folder: where the records, pictures and tables are; made if it is not there.
        only: names of parts; all if none is given.
        fresh: run recorded parts again.
        tick: told how many parts are done, and of how many.

    Returns:
        The parts in their order; those that were read have no figure.

    Raises:
        ValueError: if there is no such part.
    """
    if unknown := sorted(set(only) - set(PARTS)):
        raise ValueError(f"part must be one of {list(PARTS)}, got {unknown}")
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in PARTS if not only or name in only]
    parts = []
    for done, name in enumerate(names):
        tick(done, len(names))
        found = None if fresh else _read(folder, name, settings)
        if found is None:
            (found,) = run_theory(settings, only=(name,))
            write_part(found, folder)
            content = {"identity": _identity(settings), "part": _plain(found)}
            write_atomically(_file(folder, name), json.dumps(content, ensure_ascii=False, default=float).encode())
        parts.append(found)
    tick(len(names), len(names))
    return parts


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.part.json"


def _identity(settings: Settings) -> dict[str, Any]:
    return {"version": __version__, "quick": settings.quick, "seeds": settings.seeds, "device": settings.device}


def _plain(part: Part) -> dict[str, Any]:
    findings = [asdict(finding) for finding in part.findings]
    return {
        "name": part.name, "title": part.title, "sentence": part.sentence, "findings": findings, "table": part.table,
    }  # fmt: skip


def _read(folder: Path, name: str, settings: Settings) -> Part | None:
    file = _file(folder, name)
    if not file.is_file() or not (folder / f"{name}.png").is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["identity"] != _identity(settings):
        return None
    stored = content["part"]
    findings = [Finding(**finding) for finding in stored.pop("findings")]
    return Part(**stored, findings=findings, figure=None)
