"""How many factors? Choose the rank by cross-validation, and see why a wrong one does little harm.

    python examples/choose_rank.py choose_rank.png

The table has rank 4. With point estimates the held-out error rises as soon as there are too many
factors; with the coefficients integrated out, the default, superfluous factors are switched off by
their learnt prior.
"""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.figure import Figure

from fisherfold import MatrixCompletionCV


def main() -> Figure:
    """Cross-validate both ways and draw the errors."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(150, 4)) @ rng.normal(size=(4, 80)) / 2 + 0.5 * rng.normal(
        size=(150, 80)
    )
    table[rng.random(table.shape) < 0.7] = np.nan
    ranks = (1, 2, 3, 4, 5, 6, 8, 10, 12)

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    panel = figure.subplots()
    for inference, style in (("variational", "o-"), ("point", "s--")):
        model = MatrixCompletionCV(
            ranks, inference=inference, ridges=(None if inference == "variational" else 1.0,)
        )
        found = model.fit(table).cv_results_
        panel.errorbar(
            found["rank"],
            found["mean_rmse"],
            found["std_rmse"],
            fmt=style,
            capsize=2,
            label=inference,
        )
        print(f"{inference}: rank {model.best_rank_}, held-out RMSE {model.best_rmse_:.3f}")
    panel.axhline(0.5, color="grey", lw=0.8)
    panel.set(xlabel="rank (the table has 4)", ylabel="held-out RMSE (grey: the noise)")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main().savefig(sys.argv[1] if len(sys.argv) > 1 else "choose_rank.png", dpi=100)
