"""Pictures of fits: calibration of intervals, convergence, factors and loadings.

Each function returns the axis it drew in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from fisherfold.extras import need

need("matplotlib")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402


def plot_calibration(values: Any, predictions: Any, std: Any, *, ax: Axes | None = None) -> Axes:
    """Draw how many held-out values their intervals hold, against the nominal level.

    Args:
        values: what was observed.
        predictions: what was predicted.
        std: the standard deviations of the predictions.
        ax: where to draw; a new axis if not given.

    Example:
        >>> plot_calibration([0.0, 1.0], [0.1, 0.8], [0.2, 0.2]).get_xlabel()
        'nominal coverage, %'
    """
    ax = _axis(ax)
    levels = np.linspace(0.5, 0.99, 25)
    off = np.asarray(values, dtype=float) - np.asarray(predictions, dtype=float)
    reach = np.abs(off) / np.asarray(std, dtype=float)
    covered = [100 * float(np.mean(reach <= stats.norm.ppf(0.5 + level / 2))) for level in levels]
    ax.plot([50, 100], [50, 100], color="grey", linewidth=1)
    ax.plot(100 * levels, covered, "o-", markersize=3)
    ax.set(xlabel="nominal coverage, %", ylabel="observed coverage, %")
    return ax


def plot_convergence(
    fit: Any, *, y: str = "loss", x: str = "seconds", ax: Axes | None = None
) -> Axes:
    """Draw the trace of ``minimize`` or of an estimator, logarithmic if it spans decades.

    Args:
        fit: a ``Result``, or an estimator with ``trace_``.
        y: the column of the trace to draw.
        x: the column of the axis; the number of the row where the trace has no such column.
        ax: where to draw; a new axis if not given.

    Raises:
        ValueError: if the trace has no column ``y``.
    """
    ax = _axis(ax)
    rows = [dict(row) for row in (fit.trace_ if hasattr(fit, "trace_") else fit.trace)]
    if not rows or y not in rows[0]:
        raise ValueError(
            f"the trace has no column {y!r}; it has {sorted(rows[0]) if rows else 'no rows'}"
        )
    known = all(x in row for row in rows)
    values = [float(row[y]) for row in rows]
    ax.plot(
        [float(row[x]) for row in rows] if known else range(len(rows)), values, "o-", markersize=3
    )
    ax.set(xlabel=x if known else "iteration", ylabel=y)
    if min(values) > 0 and max(values) > 20 * min(values):
        ax.set_yscale("log")
    return ax


def plot_factors(
    model: Any,
    labels: Sequence[str] | None = None,
    *,
    side: str = "columns",
    axes: tuple[int, int] = (0, 1),
    ax: Axes | None = None,
) -> Axes:
    """Draw two principal axes of the factors of a completion model.

    Args:
        model: a fitted ``MatrixCompletion`` of rank two or more.
        labels: names written beside the members, in their order; none if not given.
        side: ``"rows"`` or ``"columns"``.
        axes: which principal axes.
        ax: where to draw; a new axis if not given.

    Raises:
        ValueError: if the side is no side, or the model has too few factors.
    """
    if side not in {"rows", "columns"}:
        raise ValueError(f"side must be 'rows' or 'columns', got {side!r}")
    ax = _axis(ax)
    factors = np.asarray(
        model.row_factors_ if side == "rows" else model.column_factors_, dtype=float
    )
    if factors.shape[1] <= max(axes):
        raise ValueError(f"the model has {factors.shape[1]} factors, too few for axes {axes}")
    centred = factors - factors.mean(0)
    _, _, components = np.linalg.svd(centred, full_matrices=False)
    points = centred @ components.T
    ax.scatter(points[:, axes[0]], points[:, axes[1]], s=6, alpha=0.5)
    for point, label in zip(points, labels if labels is not None else (), strict=False):
        ax.annotate(str(label), (point[axes[0]], point[axes[1]]), fontsize=7)
    ax.set(xlabel=f"principal axis {axes[0] + 1}", ylabel=f"principal axis {axes[1] + 1}")
    return ax


def plot_loadings(
    model: Any,
    labels: Sequence[str] | None = None,
    *,
    level: float = 0.9,
    ax: Axes | None = None,
) -> Axes:
    """Draw the loadings of a factor analysis with their confidence intervals.

    Args:
        model: a fitted ``FactorAnalysis``.
        labels: names of the variables; those of the fit if not given.
        level: the probability with which an interval is to hold the truth.
        ax: where to draw; a new axis if not given.

    Example:
        >>> from fisherfold import FactorAnalysis
        >>> x = np.random.default_rng(0).normal(size=(50, 1)) + np.eye(4)[np.arange(50) % 4]
        >>> plot_loadings(FactorAnalysis(1).fit(x)).get_xlabel()
        'loading, 90 % intervals'
    """
    ax = _axis(ax)
    low, high = model.interval(level)
    variables, factors = model.loadings_.shape
    if labels is None:
        labels = getattr(model, "feature_names_in_", [f"x{i}" for i in range(variables)])
    places = np.arange(variables, dtype=float)
    for factor in range(factors):
        centre = model.loadings_[:, factor]
        reach = np.stack([centre - low[:, factor], high[:, factor] - centre])
        height = places + 0.6 * ((factor + 0.5) / factors - 0.5)
        ax.errorbar(centre, height, xerr=reach, fmt="o", markersize=4, label=f"factor {factor + 1}")
    ax.axvline(0, color="grey", linewidth=1)
    ax.set_yticks(places, list(map(str, labels)))
    ax.invert_yaxis()
    ax.set_xlabel(f"loading, {100 * level:.0f} % intervals")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=factors, frameon=False)
    return ax


def _axis(ax: Axes | None) -> Axes:
    return plt.subplots(layout="constrained")[1] if ax is None else ax
