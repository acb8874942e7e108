"""The pictures of the theory report: one per part, drawn from plain rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.theory.report import BLACK, BLUE, COLOURS, GREEN, ORANGE, PINK, SKY, pick

Rows = Sequence[dict[str, Any]]
_GREY = "#888888"


def _sheet(panels: int, title: str) -> tuple[Figure, Any]:
    rows, columns = (2, 2) if panels == 4 else (1, panels)
    figure = Figure(figsize=(5.2 * columns, 4.0 * rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()


def _finish(panel: Any, x: str, y: str, *, log: str = "xy", legend: str | None = "best") -> None:
    if "x" in log:
        panel.set_xscale("log")
    if "y" in log:
        panel.set_yscale("log")
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid(alpha=0.3)
    if legend is not None:
        panel.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize=8, loc=legend)


def _guide(panel: Any, x: Sequence[float], through: float, power: float, label: str) -> None:
    """A dashed line of a given slope through the value at the last x."""
    panel.plot(
        x, [through * (v / x[-1]) ** power for v in x], "--", color=_GREY, linewidth=1, label=label
    )


def _medians(rows: Rows, key: str, value: str) -> tuple[list[float], list[float]]:
    keys = sorted({r[key] for r in rows})
    return keys, [
        median(r[value] for r in rows if r[key] == k and r[value] == r[value]) for k in keys
    ]


def draw_metric(steps: Sequence[float], slopes: Rows, scenes: Rows) -> Figure:
    """Part 1."""
    figure, (left, middle, right) = _sheet(3, "The RFIM is the metric of KL")
    kinds = {
        2: ("second-order retraction", BLUE),
        1: ("first-order retraction", ORANGE),
        0: ("no retraction (control)", _GREY),
    }
    # first-order retractions after those of second order, so that they are seen on top of them
    for order, (kind, colour) in kinds.items():
        for place, row in enumerate(pick(slopes, quantity="KL", order=order)):
            left.plot(
                steps,
                [max(e, 1e-18) for e in row["errors"]],
                color=colour,
                alpha=0.6,
                linewidth=0.9,
                label=kind if place == 0 else None,
            )
    _guide(left, steps, 1e-17, 3, "slope 3")
    left.set_ylim(1e-18, 1e2)
    _finish(left, "t", "| E KL(θ ‖ R(td)) - ½t²<d, F d> |")
    for row in (r for r in slopes if r["quantity"] == "loss" and r["likelihood"] == "categorical"):
        colour = {"polar": BLUE, "exp": GREEN, "qr": ORANGE, "cayley": PINK}[row["retraction"]]
        name = f"{row['retraction']} (order {row['order']}): slope {row['slope']:.2f}"
        middle.plot(steps, [max(e, 1e-18) for e in row["errors"]], color=colour, label=name)
    _finish(middle, "t", "| Ψ(R(td)) - second-order model |")
    for colour, method, style, lack in ((BLUE, "polar", "o-", "^-"), (ORANGE, "qr", "x--", "+--")):
        chosen = pick(scenes, retraction=method)
        radii, distance = _medians(chosen, "radius", "distance")
        right.plot(radii, distance, style, color=colour, label=f"argmin/ε to natural, {method}")
        right.plot(
            radii,
            [1 - v for v in _medians(chosen, "radius", "best_random")[1]],
            lack,
            color=colour,
            alpha=0.7,
            label=f"what the best random one lacks, {method}",
        )
    _finish(right, "ε", "distance, or share of the decrease", legend="lower right")
    return figure


def draw_global(runs: Rows, sigmas: Sequence[float], constants: dict[str, list[float]]) -> Figure:
    """Part 2."""
    figure, (norms, sigma, eta, linear) = _sheet(
        4, "Algorithm 1 with estimates of growing and of fixed accuracy"
    )
    labels = [
        "all samples, η₂ tiny",
        "growing batch, η₂ tiny",
        "batch 20, η₂ tiny",
        "batch 320, η₂ tiny",
        "all samples, η₂ = κ",
        "batch 80, η₂ = κ",
    ]
    etas = ["all samples, η₂ tiny", "η₂ = 0.1 κ", "all samples, η₂ = κ", "η₂ = 10 κ"]
    for panel, column, some in (
        (norms, "norms", labels),
        (sigma, "sigmas", labels),
        (eta, "norms", etas),
    ):
        for label, colour in zip(some, COLOURS, strict=False):
            for run in pick(runs, label=label):
                name = label if run["seed"] == 0 else None
                panel.plot(
                    [max(v, 1e-15) for v in run[column]], color=colour, alpha=0.7, label=name
                )
    _finish(norms, "iteration", "‖grad Ψ‖ over all samples", log="y", legend="center right")
    _finish(sigma, "iteration", "σ_k", log="y", legend=None)
    _finish(eta, "iteration", "‖grad Ψ‖, what η₂ does", log="y", legend="center right")
    for (name, values), colour in zip(constants.items(), (ORANGE, BLUE), strict=True):
        linear.plot(sigmas, values, "o-", color=colour, label=f"m_k {name}")
    _finish(linear, "σ", "σ² max |Ψ∘R - m| on the ball 1/σ")
    return figure


def draw_rates(rows: Rows, orders: Rows) -> Figure:
    """Part 3."""
    figure, (path, factor, order, jump) = _sheet(4, "Local rates of RNGD on the two-layer network")
    widths = sorted({r["width"] for r in rows})
    for step, colour in zip(sorted({r["step"] for r in rows}), COLOURS, strict=False):
        for activation, style in (("relu", "-"), ("tanh", ":")):
            own = pick(rows, step=step, activation=activation)
            label = f"t = {step:g}, {activation}"
            seen = pick(own, width=widths[-1], draw=0)[0]["residuals"]
            path.plot([v for v in seen if v > 1e-12], style, color=colour, marker=".", label=label)
            worst = [max(r["worst"] for r in pick(own, width=w)) for w in widths]
            factor.plot(widths, worst, style, color=colour, marker="o", label=label)
        if step < 1:
            path.plot(
                [seen[0] * (1 - step / 2) ** k for k in range(len(seen))],
                "--",
                color=colour,
                linewidth=0.8,
            )
        factor.axhline(1 - step / 2, linestyle="--", color=colour, linewidth=0.8)
    _finish(path, f"iteration (m = {widths[-1]}; dashed: 1 - t/2)", "‖u - y‖", log="y")
    _finish(factor, "width m", "worst factor of any step (dashed: 1 - t/2)", log="x", legend=None)
    factor.set_ylim(0, 1.5)
    _order_panel(order, orders, "left", "what one step of t = 1 leaves")
    _order_panel(jump, orders, "change", "‖J(θ¹) - J(θ⁰)‖ over one step")
    return figure


def _order_panel(panel: Any, orders: Rows, column: str, label: str) -> None:
    widths = sorted({r["width"] for r in orders})
    for width, colours in ((widths[0], (SKY, PINK)), (widths[-1], (BLUE, ORANGE))):
        for activation, colour in zip(("tanh", "relu"), colours, strict=True):
            some = [
                r for r in pick(orders, activation=activation, width=width) if r[column] > 1e-14
            ]
            panel.plot(
                [r["distance"] for r in some],
                [r[column] for r in some],
                ".-",
                color=colour,
                label=f"{activation}, m = {width}",
            )
    _finish(panel, "distance r of the targets", label)


def draw_stability(rows: Rows, caps: Rows) -> Figure:
    """Part 4."""
    figure, (change, probability, ball, cap) = _sheet(
        4, "Jacobian stability of the two-layer network"
    )
    relu, tanh = (pick(rows, activation=a) for a in ("relu", "tanh"))
    for some, column, colour, name in (
        (relu, "adversary_1", ORANGE, "ReLU, worst found"),
        (relu, "random_1", BLUE, "ReLU, random"),
        (tanh, "random_1", GREEN, "tanh, random"),
    ):
        widths, values = _medians(some, "width", column)
        change.plot(widths, values, "o-", color=colour, label=name)
        power = {"adversary_1": -1 / 6, "random_1": -1 / 4 if some is relu else -1 / 2}[column]
        _guide(change, widths, values[-1], power, f"m^{power:.3g}")
    _finish(change, "width m", "‖J(θ) - J(θ⁰)‖ at ‖θ - θ⁰‖ = 1")
    one = pick(relu, targets="order one")
    for column, colour, name in (
        ("lemma_for_draw", BLACK, "lemma for the draw"),
        ("adversary", ORANGE, "worst found"),
        ("random", BLUE, "random"),
        ("path", PINK, "where RNGD ends"),
    ):
        widths, values = _medians([r for r in one if r[column] < float("inf")], "width", column)
        ball.plot(widths, values, "o-", color=colour, label=name)
    widths, least = _medians(one, "width", "sigma0")
    ball.plot(widths, [v / 6 for v in least], "--", color=GREEN, label="allowed: σ₀/6")
    _finish(ball, "width m", "‖ΔJ‖ on the ball of the assumption, ReLU")
    for some, style, activation in ((relu, "o-", "ReLU"), (tanh, "^:", "tanh")):
        for where, colour in (("path", PINK), ("random", BLUE), ("adversary", ORANGE)):
            near = pick(some, targets="near")
            shares = [
                fmean(r[where] <= r["sigma0"] / 6 for r in pick(near, width=w)) for w in widths
            ]
            probability.plot(widths, shares, style, color=colour, label=f"{activation}, {where}")
    _finish(probability, "width m", "share of draws with ‖ΔJ‖ ≤ σ₀/6, near targets", log="x")
    for dim, colour in zip(sorted({r["dimension"] for r in caps}), COLOURS, strict=False):
        some = pick(caps, dimension=dim)
        shares = [r["exact"] / r["bound"] for r in some]
        cap.plot([r["gamma"] for r in some], shares, "o-", color=colour, label=f"n = {dim}")
    cap.axhline(1, color=_GREY, linestyle="--")
    cap.set_ylim(0, 1.1)
    _finish(cap, "γ", "P(|xᵀv| ≤ γ) over √(πn) γ", log="x")
    return figure


def draw_invariance(rows: Rows) -> Figure:
    """Part 5."""
    figure, (radial, cosine) = _sheet(2, "Rows behind a normalisation: exact gradients and hooks")
    kinds = list(dict.fromkeys(r["normalisation"] for r in rows))
    for column, colour, label, shift in (
        ("radial_true", BLUE, "exact, per sample", -0.2),
        ("radial_hooks", ORANGE, "hooks, per sample", 0.2),
    ):
        values = [median(r[column] for r in pick(rows, normalisation=kind)) for kind in kinds]
        places = [k + shift for k in range(len(kinds))]
        radial.bar(places, [max(v, 1e-33) ** 0.5 for v in values], 0.4, color=colour, label=label)
    radial.set_xticks(range(len(kinds)), kinds)
    _finish(radial, "normalisation", "radial part of the gradient", log="y", legend="lower right")
    for row in (r for r in rows if r["normalisation"] in {"batch", "none"}):
        colour = ORANGE if row["normalisation"] == "batch" else GREEN
        values = row["cosines"]
        name = f"{row['normalisation']} normalisation" if row["seed"] == 0 else None
        cosine.plot(
            [k / (len(values) - 1) for k in range(len(values))],
            values,
            color=colour,
            alpha=0.7,
            label=name,
        )
    _finish(cosine, "share of samples", "cosine of hook row and true gradient", log="")
    return figure
