"""The theory of the paper, made visible.

Five parts, each a figure, a table and findings with verdicts.

metric      Theorem 1: the RFIM is the metric of KL; the natural direction is the steepest one
global      Algorithm 1 with estimates of growing and of fixed accuracy
rates       local linear and quadratic rates on the two-layer network
stability   how far the Jacobian of that network moves, against its width
invariance  rows behind a normalisation: <∇w_i, w_i> = 0 and RFIM = FIM
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.theory import global_convergence, invariance, rates, stability, steepest
from benchmarks.theory.report import Finding, Part, Settings, write_part
from fisherfold import __version__
from fisherfold.plain import counted
from fisherfold.progress import track
from fisherfold.reproduce import reproduce
from fisherfold.reproduce.page import Section, Table, Verdict
from fisherfold.reproduce.workers import Workers

PARTS: dict[str, Callable[[Settings], Part]] = {
    "metric": steepest.part,
    "global": global_convergence.part,
    "rates": rates.part,
    "stability": stability.part,
    "invariance": invariance.part,
}

__all__ = ["PARTS", "Finding", "Part", "Settings", "chosen", "run", "section"]


def chosen(only: Sequence[str]) -> list[str]:
    """The names of the parts that are asked for, all if none is."""
    if unknown := sorted(set(only) - set(PARTS)):
        raise ValueError(f"part must be one of {list(PARTS)}, got {unknown}")
    return [name for name in PARTS if not only or name in only]


def run(options: reproduce.Options, parts: tuple[str, ...] = ()) -> list[Section]:
    """Measure the parts of the theory that are not there yet; write their files and sections."""
    settings = Settings(quick=options.quick, seeds=options.seeds)
    shown = {"quick": options.quick, "seeds": options.seeds, "version": __version__}
    names = chosen(parts)
    files = {name: options.section_file(f"theory-{name}") for name in names}
    missing = [
        n for n in names if (found := Section.load(files[n])) is None or found.settings != shown
    ]
    with track("theory", len(names)) as line, Workers(options.jobs) as workers:
        line.update(len(names) - len(missing))
        one = partial(_measure, settings, options.folder / "theory")
        for part in workers.each(one, missing) if options.jobs > 1 else map(one, missing):
            section(part, shown, options.command(f"theory-{part.name}")).save(files[part.name])
            line.advance()
    return [found for name in names if (found := Section.load(files[name])) is not None]


def _measure(settings: Settings, folder: Path, name: str) -> Part:
    part = PARTS[name](settings)
    write_part(part, folder)
    return replace(part, figure=None)


def section(part: Part, settings: dict[str, object], command: str = "") -> Section:
    """One part of the theory as a section."""
    seen = Counter(str(finding.verdict) for finding in part.findings)
    words = {"holds": "true", "partly": "true with a restriction", "fails": "not true"}
    counts = ", ".join(
        f"{seen[verdict]} {word}" for verdict, word in words.items() if seen[verdict]
    )
    why = [f"{counted(len(part.findings), 'statement')}: {counts}."]
    why += [
        f"Does not hold: {f.name} (measured {f.measured:.3g})."
        if isinstance(f.measured, float)
        else f"Does not hold: {f.name} (measured {f.measured})."
        for f in part.findings
        if f.verdict == "fails"
    ]
    rows = [[f.name, f.predicted, f.measured, f.verdict, f.note] for f in part.findings]
    table = Table(
        "Findings", ["statement", "predicted", "measured", "verdict", "how it was measured"], rows
    )
    verdict: Verdict = "holds partly"
    if len(seen) == 1 and "partly" not in seen:
        verdict = "holds" if "holds" in seen else "does not hold"
    name = f"theory-{part.name}"
    return Section(
        name,
        f"Theory: {part.title}",
        reproduce.CLAIMS[name],
        verdict,
        why,
        settings,
        command,
        [table],
        f"theory/{part.name}.png",
        [part.sentence],
    )
