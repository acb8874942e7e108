"""Held-out error of related regressions and classifications.

Regression: NMSE (mean over tasks of squared error over variance), 80 % of each task's rows for
training. Classification: error rate, the distributed splits. Peers are tuned on a fifth of the
training rows, as our point model is.

Against: ridge, pooled ridge, PLS, reduced rank, multi-task lasso and elastic net
Takes: half an hour
Page: docs/benchmarks/subspace.md
"""

from __future__ import annotations

import time
import warnings
from argparse import ArgumentParser, Namespace

import numpy as np
from sklearn.cross_decomposition import PLSRegression
from sklearn.linear_model import LogisticRegression, MultiTaskElasticNetCV, MultiTaskLassoCV, Ridge
from sklearn.preprocessing import StandardScaler

from benchmarks._common import mean_and_spread
from fisherfold import datasets
from fisherfold.reproduce.subspace import split_rows
from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
from fisherfold.subspace.problem import held_out_rows

SMOKE = "school sarcos letter --splits 1"

warnings.filterwarnings("ignore")
ALPHAS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def nmse(predicted, y, task):
    ratios = [
        np.mean((predicted - y)[task == t] ** 2) / np.var(y[task == t], ddof=1)
        for t in np.unique(task)
        if (task == t).sum() > 1 and np.var(y[task == t]) > 0
    ]
    return np.mean(ratios)


def tuned(fit, choices, X, y, task, score):
    held = held_out_rows(task, 0)

    def error(choice):
        return score(
            fit(choice, X[~held], y[~held], task[~held])(X[held], task[held]), y[held], task[held]
        )

    return fit(min(choices, key=error), X, y, task)


def per_task(alpha, X, y, task):
    models = {t: Ridge(alpha=alpha).fit(X[task == t], y[task == t]) for t in np.unique(task)}
    return lambda Xn, tn: _by_task(models, Xn, tn, lambda m, rows: m.predict(rows))


def pooled(alpha, X, y, task):
    model = Ridge(alpha=alpha).fit(X, y)
    return lambda Xn, tn: model.predict(Xn)


def pooled_with_intercepts(alpha, X, y, task):
    """Pooled slopes and an intercept per task, shrunk together: ridge on one-hot task columns."""
    hot = np.eye(task.max() + 1)
    model = Ridge(alpha=alpha).fit(np.c_[X, 3 * hot[task]], y)
    return lambda Xn, tn: model.predict(np.c_[Xn, 3 * hot[tn]])


def pls(components, X, y, task):
    """Partial least squares on features interacting with the task (one block per task)."""
    blocks = np.zeros((len(X), (task.max() + 1) * X.shape[1]))
    for t in np.unique(task):
        blocks[task == t, t * X.shape[1] : (t + 1) * X.shape[1]] = X[task == t]
    wide = PLSRegression(n_components=components, scale=False).fit(np.c_[X, blocks], y)

    def predict(Xn, tn):
        more = np.zeros((len(Xn), blocks.shape[1]))
        for t in np.unique(tn):
            more[tn == t, t * X.shape[1] : (t + 1) * X.shape[1]] = Xn[tn == t]
        return wide.predict(np.c_[Xn, more]).reshape(-1)

    return predict


def reduced_rank(choice, X, y, task):
    """Per-task ridge coefficients, centred, cut to their leading directions."""
    alpha, rank = choice
    tasks = np.unique(task)
    models = {t: Ridge(alpha=alpha).fit(X[task == t], y[task == t]) for t in tasks}
    weights = np.stack([np.r_[models[t].coef_, models[t].intercept_] for t in tasks])
    mean = weights.mean(0)
    u, s, v = np.linalg.svd(weights - mean, full_matrices=False)
    cut = mean + (u[:, :rank] * s[:rank]) @ v[:rank]
    table = dict(zip(tasks, cut, strict=True))
    return lambda Xn, tn: np.array(
        [row @ table[t][:-1] + table[t][-1] for row, t in zip(Xn, tn, strict=True)]
    )


def _by_task(models, X, task, call):
    out = np.empty(len(X))
    for t in np.unique(task):
        out[task == t] = call(models[t], X[task == t])
    return out


def regression(name, splits):
    data = datasets.load_tasks("school" if name == "school" else "sarcos_7x2000")
    found: dict[str, list] = {}
    for seed in range(splits):
        train, test = split_rows(data.task, seed)
        scaler = StandardScaler().fit(data.X[train])
        X = scaler.transform(data.X[train])
        Xt = scaler.transform(data.X[test])
        y = data.y[train]
        task = data.task[train]
        yt = data.y[test]
        tt = data.task[test]

        def record(label, predict, seconds, Xt=Xt, yt=yt, tt=tt):
            found.setdefault(label, []).append((nmse(predict(Xt, tt), yt, tt), seconds))

        ranks = (6,) if name == "school" else (6, 22)
        for rank in ranks:
            for options in ({}, {"inference": "point", "random_state": 0}):
                began = time.process_time()
                model = SubspaceRegressor(rank=rank, **options).fit(data.X[train], y, task=task)
                seconds = time.process_time() - began
                label = f"SubspaceRegressor, {options.get('inference', 'marginal')}, rank {rank}"

                def predict(_, tn, model=model, rows=data.X[test]):
                    return model.predict(rows, task=tn)

                record(label, predict, seconds)
        peers = [
            ("ridge per task", per_task, ALPHAS),
            ("pooled ridge", pooled, ALPHAS),
            ("pooled ridge + intercept per task", pooled_with_intercepts, ALPHAS),
            (
                "reduced rank of per-task ridge",
                reduced_rank,
                [(a, r) for a in (10.0, 100.0) for r in (1, 2, 4, 6)],
            ),
        ]
        peers.append(("PLS, features x task", pls, (1, 2, 3, 5, 8)))
        for label, fit, choices in peers:
            began = time.process_time()
            predict = tuned(fit, choices, X, y, task, nmse)
            record(label, predict, time.process_time() - began)
    show(f"{name}: held-out NMSE", found)


def shared_rows(splits):
    """Peers that need one X for all outputs: the SARCOS test file, 7 torques."""
    table = datasets.load("sarcos_test")
    found: dict[str, list] = {}
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(table.X))
        train = order[: int(0.8 * len(order))]
        test = order[int(0.8 * len(order)) :]
        scaler = StandardScaler().fit(table.X[train])
        X = scaler.transform(table.X[train])
        Xt = scaler.transform(table.X[test])
        Y = table.Y[train]
        Yt = table.Y[test]
        models = {
            "SubspaceRegressor, marginal, rank 6": SubspaceRegressor(rank=6),
            "SubspaceRegressor, marginal, full rank": SubspaceRegressor(rank=22),
            "MultiTaskLassoCV": MultiTaskLassoCV(cv=3),
            "MultiTaskElasticNetCV": MultiTaskElasticNetCV(cv=3),
            "ridge per output": Ridge(alpha=1.0),
            "PLSRegression, 6 components": PLSRegression(n_components=6),
            "PLSRegression, 15 components": PLSRegression(n_components=15),
        }
        for label, model in models.items():
            began = time.process_time()
            model.fit(X, Y)
            seconds = time.process_time() - began
            error = np.mean(((model.predict(Xt) - Yt) ** 2).mean(0) / Yt.var(0, ddof=1))
            found.setdefault(label, []).append((error, seconds))
    show("sarcos_test, 7 outputs over shared rows: held-out NMSE", found)


def classification(name, splits):
    data = datasets.load_tasks(name)
    found: dict[str, list] = {}

    def error(predicted, y, task):
        return np.mean([np.mean((predicted != y)[task == t]) for t in np.unique(task)])

    def own(C, X, y, task):
        models = {
            t: LogisticRegression(C=C, max_iter=1000).fit(X[task == t], y[task == t])
            for t in np.unique(task)
        }
        return lambda Xn, tn: _by_task(models, Xn, tn, lambda m, rows: m.predict(rows))

    def all_in_one(C, X, y, task):
        model = LogisticRegression(C=C, max_iter=1000).fit(X, y)
        return lambda Xn, tn: model.predict(Xn)

    for split in data.train_idx[:splits]:
        test = np.setdiff1d(np.arange(len(data.y)), split)
        X = data.X[split]
        y = data.y[split]
        task = data.task[split]
        for rank in (2, 4, 6):
            began = time.process_time()
            model = SubspaceClassifier(rank=rank, scale=False, random_state=0).fit(X, y, task=task)
            seconds = time.process_time() - began
            value = error(
                model.predict(data.X[test], task=data.task[test]), data.y[test], data.task[test]
            )
            found.setdefault(f"SubspaceClassifier, rank {rank}", []).append((value, seconds))
        for label, fit in (("logistic per task", own), ("pooled logistic", all_in_one)):
            began = time.process_time()
            predict = tuned(fit, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0), X, y, task, error)
            seconds = time.process_time() - began
            value = error(predict(data.X[test], data.task[test]), data.y[test], data.task[test])
            found.setdefault(label, []).append((value, seconds))
    show(f"{name}: held-out error rate", found)


def show(title, found):
    print(f"\n{title}\n\n| method | error | CPU s |\n|---|---|---|")
    for label, values in found.items():
        errors, seconds = np.array(values).T
        error = mean_and_spread(errors.tolist(), 4)
        print(f"| {label} | {error} | {seconds.mean():.2f} |", flush=True)


def options(parser: ArgumentParser) -> None:
    every = ("school", "sarcos", "mhc", "letter")
    parser.add_argument("data", nargs="*", choices=[*every, []], default=list(every))
    parser.add_argument("--splits", type=int, default=5, help="into training and test parts (5)")


def main(given: Namespace) -> None:
    for name in given.data:
        if name in {"school", "sarcos"}:
            regression(name, given.splits)
        else:
            classification(name, given.splits)
        if name == "sarcos":
            shared_rows(given.splits)
