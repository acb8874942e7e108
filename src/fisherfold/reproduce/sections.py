"""Claims of the paper, and from what each experiment returns to its section of the report page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fisherfold._version import __version__
from fisherfold.plain import counted
from fisherfold.reproduce.figures import FigureResult
from fisherfold.reproduce.page import Section, Table, Verdict
from fisherfold.reproduce.theory.report import Part
from fisherfold.reproduce.verdicts import Kind, compare, judge, true_count

FASTEST = "RNGD converges fastest of the four methods, in training and in test error."
CLAIMS: dict[str, tuple[Kind, str]] = {
    "jester": ("fastest", FASTEST),
    "movielens": ("fastest", FASTEST),
    "school": ("lowest", "RNGD ends at the point with the lowest error of the four methods."),
    "sarcos": ("lowest", "RNGD ends at the point with the lowest error of the four methods, by a wide margin."),
}
THEORY_CLAIMS = {
    "metric": "The RFIM is the metric of the Kullback-Leibler divergence, to third order along a second-order "
    "retraction, and the natural direction is the steepest one (Theorem 1).",
    "global": "Along Algorithm 1 with stochastic estimates the gradient tends to zero.",
    "rates": "On the two-layer network RNGD converges linearly with factor 1 - t/2, and quadratically at t = 1.",
    "stability": "The Jacobian of a wide two-layer network moves little around its random start.",
    "invariance": "Behind a normalisation the gradient of a row is orthogonal to the row, and RFIM = FIM.",
}


def figure_section(
    result: FigureResult, *, command: str, picture: str, more: Mapping[str, str] | None = None
) -> Section:
    """A four-method figure as a section."""
    plan = result.plan
    kind, claim = CLAIMS[plan.name]
    comparisons, true = ([compare(result, c, kind, true=true) for c in plan.metrics] for true in (False, True))
    why = [c.sentence(plan.metrics[c.column], plan.methods[0].label) for c in comparisons]
    settings = {**plan.settings, "budget (#grad/N, the paper's count)": plan.budget, "seeds": len(result.seeds),
                "version": __version__}  # fmt: skip
    notes = [*(f"{name}: {sentence}" for name, sentence in (more or {}).items()), *filter(None, [plan.note])]
    raw = [f"{picture.removesuffix('png')}{kind}" for kind in ("csv", "json")]
    return Section(
        plan.name, plan.title, claim, judge(comparisons, true), [*why, true_count(result, true)], settings, command,
        [_final_table(result), _search_table(result)], picture, notes, raw,
    )  # fmt: skip


def theory_section(part: Part, *, command: str, folder: Path, settings: Mapping[str, Any]) -> Section:
    """One part of the theory as a section."""
    seen = Counter(str(finding.verdict) for finding in part.findings)
    words = {
        "holds": ("holds", "hold"), "partly": ("holds with a restriction", "hold with a restriction"),
        "fails": ("does not hold", "do not hold"),
    }  # fmt: skip
    counts = ", ".join(counted(seen[verdict], *word) for verdict, word in words.items() if seen[verdict])
    why = [f"Of {counted(len(part.findings), 'statement')} {counts}."]
    why += [f"Does not hold: {f.name} (measured {_number(f.measured)})." for f in part.findings if f.verdict == "fails"]
    rows = [[f.name, f.predicted, f.measured, f.verdict, f.note] for f in part.findings]
    table = Table("Findings", ["statement", "predicted", "measured", "verdict", "how it was measured"], rows)
    title = f"Theory: {part.title}{' (quick sketch)' * bool(settings.get('quick'))}"
    raw = [(folder / file).as_posix() for file in (f"{part.name}.csv", "theory.json")]
    return Section(
        f"theory-{part.name}", title, THEORY_CLAIMS[part.name], theory_verdict(seen), why,
        {**settings, "version": __version__}, command, [table], (folder / f"{part.name}.png").as_posix(),
        [part.sentence], raw,
    )  # fmt: skip


def theory_verdict(seen: Mapping[str, int]) -> Verdict:
    """The verdict on a part from how often its findings hold, hold partly or fail.

    Examples:
        >>> theory_verdict({"holds": 3, "fails": 1})
        'holds partly'
    """
    found = {verdict for verdict, count in seen.items() if count}
    return "holds" if found == {"holds"} else "does not hold" if found == {"fails"} else "holds partly"


def _final_table(result: FigureResult) -> Table:
    metrics = result.plan.metrics
    heads = [head for label in metrics.values() for head in (label, "± sd")]
    rows = [
        [row["method"], row["step"], *(row[name] for metric in metrics for name in (metric, f"{metric}_sd")),
         row["seconds"], row["paper_grads"], row["true_grads"]]
        for row in result.table()
    ]  # fmt: skip
    over = f", mean and standard deviation over {len(result.seeds)} seeds" if len(result.seeds) > 1 else " of one seed"
    columns = ["method", "step", *heads, "seconds", "#grad/N (paper)", "#grad/N (true)"]
    return Table(f"Final figures{over}", columns, rows)


def _search_table(result: FigureResult) -> Table:
    rows = [
        [label, run.step, run.last("loss"), run.status, "yes" if run.step == result.runs[label][0].step else ""]
        for label, runs in result.searched.items()
        for run in sorted(runs, key=lambda run: -(run.step or 0))
    ]
    return Table("Step sizes searched on the first seed", ["method", "step", "final loss", "status", "chosen"], rows)


def _number(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value
