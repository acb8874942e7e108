"""From what each kind of experiment returns to a section of the page: one adapter per kind.

Verdicts are computed here from the recorded numbers; the claims are the paper's sentences in our words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fisherfold._version import __version__
from fisherfold.plain import counted
from fisherfold.reproduce import demo
from fisherfold.reproduce.plots import AXES
from fisherfold.reproduce.runs import FigureResult, band
from fisherfold.reproduce.sections import Band, Chart, Section, Series, Table, Verdict
from fisherfold.reproduce.theory.report import Part
from fisherfold.reproduce.verdicts import Kind, compare, judge, true_count

FASTEST = "RNGD converges fastest of the four methods, in training and in test error."
DEMO = "Natural gradient (rngd, mkfac) beside first-order methods whose step sizes are the best of a small grid."
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
    """A four-method figure.

    Args:
        result: its runs.
        command: what repeats it.
        picture: its PNG below the folder of the page.
        more: further results, a name and a sentence each.

    Returns:
        The section.
    """
    plan = result.plan
    kind, claim = CLAIMS.get(plan.name, ("lowest", CLAIMS["school"][1]))
    comparisons, true = ([compare(result, c, kind, true=true) for c in plan.metrics] for true in (False, True))
    first = plan.methods[0].label
    why = [c.sentence(plan.metrics[c.column], first) for c in comparisons]
    series = [_series(label, runs, plan.metrics) for label, runs in result.runs.items()]
    chart = Chart(_spread(result), AXES, plan.metrics, series, any(map(_spans_decades, series)))
    raw = [f"{picture.removesuffix('png')}{kind}" for kind in ("csv", "json")]
    settings = {
        **plan.settings, "budget (#grad/N, the paper's count)": plan.budget, "seeds": len(result.seeds),
        "version": __version__,
    }  # fmt: skip
    notes = [*(f"{name}: {sentence}" for name, sentence in (more or {}).items()), *filter(None, [plan.note])]
    return Section(
        plan.name, plan.title, claim, judge(comparisons, true), [*why, true_count(result, true)],
        settings, command, [chart], [_final_table(result), _search_table(result)], picture, notes, raw,
    )  # fmt: skip


def _spread(result: FigureResult) -> str:
    seeds = len(result.seeds)
    return f"median over {seeds} seeds, band from least to greatest" if seeds > 1 else "one seed"


def _series(label: str, runs: Sequence[Any], metrics: Mapping[str, str]) -> Series:
    y, x = {}, {axis: band(runs, axis, next(iter(metrics)))[0] for axis in AXES}
    for metric in metrics:
        _, median, least, greatest = band(runs, next(iter(AXES)), metric)
        y[metric] = Band(median, least, greatest)
    return Series(label, x, y)


def _spans_decades(series: Series) -> bool:
    values = [v for v in next(iter(series.y.values())).median if v is not None and math.isfinite(v)]
    return bool(values) and min(values) > 0 and max(values) > 20 * min(values)


def _final_table(result: FigureResult) -> Table:
    metrics = result.plan.metrics
    columns = ["method", "step"]
    for label in metrics.values():
        columns += [label, "± sd"]
    rows = []
    for row in result.table():
        errors = [row[name] for metric in metrics for name in (metric, f"{metric}_sd")]
        costs = [row["seconds"], row["paper_grads"], row["true_grads"]]
        rows.append([row["method"], row["step"], *errors, *costs])
    over = f", mean and standard deviation over {len(result.seeds)} seeds" if len(result.seeds) > 1 else " of one seed"
    return Table(f"Final figures{over}", [*columns, "seconds", "#grad/N (paper)", "#grad/N (true)"], rows)


def _search_table(result: FigureResult) -> Table:
    rows = [
        [label, run.step, run.last("loss"), run.status, "yes" if run.step == result.runs[label][0].step else ""]
        for label, runs in result.searched.items()
        for run in sorted(runs, key=lambda run: -(run.step or 0))
    ]
    return Table("Step sizes searched on the first seed", ["method", "step", "final loss", "status", "chosen"], rows)


def theory_section(part: Part, *, command: str, folder: Path, settings: Mapping[str, Any]) -> Section:
    """One part of the theory.

    Args:
        part: the part.
        command: what repeats it.
        folder: where its files are, below the folder of the page.
        settings: how it was run.

    Returns:
        The section.
    """
    sketch = " (quick sketch)" if settings.get("quick") else ""
    raw = [(folder / file).as_posix() for file in (f"{part.name}.csv", "theory.json")]
    settings = {**settings, "version": __version__}
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
    return Section(
        f"theory-{part.name}", f"Theory: {part.title}{sketch}", THEORY_CLAIMS[part.name], theory_verdict(seen), why,
        settings, command, part.charts, [table], (folder / f"{part.name}.png").as_posix(), [part.sentence],
        raw,
    )  # fmt: skip


def theory_verdict(seen: Mapping[str, int]) -> Verdict:
    """The verdict on a part from how often its findings hold, hold partly or fail.

    Args:
        seen: how many findings there are by verdict.

    Returns:
        The verdict.

    Examples:
        >>> theory_verdict({"holds": 3, "fails": 1})
        'holds partly'
    """
    found = {verdict for verdict, count in seen.items() if count}
    if found == {"holds"}:
        return "holds"
    return "does not hold" if found == {"fails"} else "holds partly"


def demo_section(runs: Sequence[demo.Run], *, command: str) -> Section:
    """The demo: a chart per problem and one table.

    Args:
        runs: its runs.
        command: what repeats it.

    Returns:
        The section.
    """
    heights = demo.gaps(list(runs))
    charts = []
    for problem, title in demo.TITLES.items():
        label = "training loss" if problem == "digits" else "training loss above the lowest found"
        series = []
        for run in (run for run in runs if run.problem == problem):
            values = [max(gap, demo.FLOORS[problem]) for gap in heights[problem, run.method]]
            seconds: Sequence[float | None] = run.times or [None] * len(values)
            x = {"passes": run.passes, "seconds": seconds}
            series.append(Series(run.method, x, {"loss": Band(values, values, values)}))
        axes = {"passes": "passes over the data", "seconds": "seconds"}
        charts.append(Chart(title, axes, {"loss": label}, series, True))
    rows = [
        [run.problem, run.method, run.step, run.passes[-1], run.values[-1], heights[run.problem, run.method][-1],
         run.seconds, None if math.isnan(run.accuracy) else 100 * run.accuracy]
        for run in runs
    ]  # fmt: skip
    columns = ["problem", "method", "step", "passes", "loss", "gap", "seconds", "test accuracy (%)"]
    table = Table(f"Final figures; {demo.GAP}", columns, rows)
    lead = [_leader(problem, runs) for problem in demo.TITLES]
    return Section(
        "demo", "Three small problems", DEMO, "no claim", lead, {"version": __version__}, command, charts, [table],
    )  # fmt: skip


def _leader(problem: str, runs: Sequence[demo.Run]) -> str:
    ranked = sorted((run for run in runs if run.problem == problem), key=lambda run: run.values[-1])
    best, *rest = ranked
    if not rest:
        return f"{demo.TITLES[problem]}: {best.method} alone was run."
    return (
        f"{demo.TITLES[problem]}: {best.method} ends lowest, with a training loss of {best.values[-1]:.6g}; "
        f"{rest[0].method} is next, {rest[0].values[-1] - best.values[-1]:.2g} above."
    )


def _number(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value
