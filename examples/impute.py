"""A table with NaN: impute it, and see what each way of imputing costs.

    python examples/impute.py impute.png

Values of scikit-learn's wine table are hidden at random and filled by ``LowRankImputer`` and by
scikit-learn's imputers. The error is that of the hidden values, in standard deviations of their
column.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

from fisherfold import LowRankImputer


def main() -> Figure:
    """Hide more and more, impute, and draw the errors."""
    table = load_wine().data
    table = (table - table.mean(axis=0)) / table.std(axis=0)
    imputers = {
        "LowRankImputer (fisherfold)": LowRankImputer(rank=5),
        "IterativeImputer": IterativeImputer(max_iter=5, random_state=0),
        "KNNImputer": KNNImputer(),
        "column means": SimpleImputer(keep_empty_features=True),
    }
    shares = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    errors = {name: [] for name in imputers}
    for share in shares:
        hidden = np.random.default_rng(0).random(table.shape) < share
        holes = np.where(hidden, np.nan, table)
        for name, imputer in imputers.items():
            with warnings.catch_warnings():
                # five rounds are few for IterativeImputer, and enough for its error
                warnings.simplefilter("ignore", ConvergenceWarning)
                filled = imputer.fit_transform(holes)
            errors[name].append(np.sqrt(np.mean((filled - table)[hidden] ** 2)))
    for name, values in errors.items():
        print(f"{name:28}" + "  ".join(f"{value:.3f}" for value in values))

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    for (name, values), style in zip(errors.items(), ("o-", "s--", "^:", "x-."), strict=True):
        panel.plot([100 * share for share in shares], values, style, label=name)
    panel.set(xlabel="hidden values (%)", ylabel="RMSE of the hidden values", ylim=(0.5, 1.1))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "impute.png", dpi=100)
