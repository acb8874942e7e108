"""One fit of every estimator, and everything one can ask of it as an array: for tests that compare bits."""

from __future__ import annotations

import numpy as np

from fisherfold.completion import LowRankImputer, MatrixCompletion, MatrixCompletionCV
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor

rng = np.random.default_rng(0)
ROWS, COLUMNS = np.nonzero(rng.random((50, 30)) < 0.4)
PAIRS = np.column_stack([ROWS, COLUMNS])
VALUES = (rng.normal(size=(50, 2)) @ rng.normal(size=(2, 30)))[ROWS, COLUMNS] + 0.3 * rng.normal(
    size=len(ROWS)
)
NAMES = np.array([(f"u{i}", f"i{j}") for i, j in PAIRS], dtype=object)
HOLES = rng.normal(size=(80, 2)) @ rng.normal(size=(2, 8))
HOLES[rng.random(HOLES.shape) < 0.2] = np.nan
X, TASK = rng.normal(size=(300, 6)), rng.integers(12, size=300)
Y = (X * (rng.normal(size=(12, 2)) @ rng.normal(size=(2, 6)))[TASK]).sum(1) + 0.3 * rng.normal(
    size=300
)


def _completion(**options):
    return lambda: MatrixCompletion(**{"rank": 2, "max_iter": 8} | options).fit(NAMES, VALUES)


def _regression(**options):
    return lambda: SubspaceRegressor(2, **{"max_iter": 8, "random_state": 0} | options).fit(
        X, Y, task=TASK
    )


FITS = {
    "completion": _completion(),
    "completion, float64": _completion(dtype="float64", rated_sets=False),
    "completion, point": _completion(inference="point"),
    "completion, cv": lambda: MatrixCompletionCV((1, 3), max_iter=5).fit(NAMES, VALUES),
    "imputer": lambda: LowRankImputer(2).fit(HOLES),
    "regression": _regression(),
    "regression, shared noise": _regression(noise="shared"),
    "regression, point": _regression(inference="point", ridge=1.0),
    "regression, chosen ridge": _regression(inference="point"),
    "classification": lambda: SubspaceClassifier(2, max_iter=8).fit(X, Y > 0, task=TASK),
}


def answers(model):
    """What the model says, as bytes."""
    if isinstance(model, LowRankImputer):
        found = [model.transform(HOLES)]
    elif isinstance(model, (MatrixCompletion, MatrixCompletionCV)):
        errors = model.model_.inference == "variational"
        found = list(model.predict(NAMES, return_std=True)) if errors else [model.predict(NAMES)]
        found += [
            model.predict([("new", "i3"), ("u3", "new")]),
            model.recommend("u7", 9)["prediction"].to_numpy(),
        ]
        found.append(
            model.predict_new(["i1", "i5", "i9"], [1.0, -1.0, 0.5], [f"i{j}" for j in range(20)])
        )
    elif isinstance(model, SubspaceClassifier):
        found = [model.predict_proba(X, task=TASK), model.transform(X)]
    else:
        found = [model.predict(X, task=TASK), model.transform(X)]
        if model.inference == "marginal":
            found += model.predict(X, task=TASK, return_std=True)
    return [np.ascontiguousarray(array).tobytes() for array in found]
