"""Factor analysis with intervals: which questions belong to which factor, and how sure is that?

    python examples/factor_loadings.py factor_loadings.png

Twelve answers of 300 people hang together by three correlated factors; a tenth of the answers is
missing. Loadings are rotated by oblimin and drawn with 90 % intervals.
"""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.figure import Figure

from fisherfold import FactorAnalysis
from fisherfold.plots import plot_loadings

LOADINGS = np.kron(np.eye(3), [[0.8], [0.7], [0.6], [0.7]])
CORRELATIONS = [[1.0, 0.4, 0.3], [0.4, 1.0, 0.2], [0.3, 0.2, 1.0]]


def answers(n: int) -> np.ndarray:
    """Rows of twelve answers with holes."""
    rng = np.random.default_rng(0)
    factors = rng.multivariate_normal(np.zeros(3), CORRELATIONS, size=n)
    rows = factors @ LOADINGS.T + 0.6 * rng.standard_normal((n, 12))
    rows[rng.random(rows.shape) < 0.1] = np.nan
    return rows


def main() -> Figure:
    """Fit, print the table and draw the intervals."""
    model = FactorAnalysis(3, rotation="oblimin").fit(answers(300))
    print(model.summary())
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    plot_loadings(model, [f"question {i + 1}" for i in range(12)], ax=figure.subplots())
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "factor_loadings.png", dpi=110)
