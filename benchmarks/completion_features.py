"""Completion with features, time and ordered categories.

Users have gender, age group, occupation (MovieLens-1M: and the first two digits of the zip code);
films have genres, year and half decade. ``ablation`` runs the official folds of MovieLens-100K with
and without each of features, time and ordered categories; ``ml1m`` random tenths; ``cold`` holds
out all ratings of a tenth of the films, or of the users, and compares with cmfrec's side
information and with factorisation machines of ids and features, as LightFM's (by myFM). Printed are
the held-out RMSE, the share of values within 90 % intervals (for categories that of randomised
quantiles, because whole steps hold more), the root mean square of error over standard deviation,
how far the mean probability of a category is from its frequency at most, their expected calibration
error (ten bins of each category's probability), the mean log likelihood, and the CPU seconds of
``fit``. ``myfm`` fits ours and myFM (``pip install myfm``, Gibbs sampling: regression and ordered
probit) to fold 1 of 100K and to seed 0 of 1M with the same features, rated sets and days. ``tune``
compares ranks on a tenth of the training part of fold 1 (100K) and of seed 0 (1M). One thread.

Against: myFM, cmfrec
Takes: two minutes for `ablation`, an hour for `myfm` and `cold`
Page: docs/benchmarks/completion.md
"""

from __future__ import annotations

import math
import os
import time
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks._common import integers, left_out
from fisherfold import MatrixCompletion

SMOKE = (
    "ablation --folds 1 --rank 2",
    "ml1m --seeds 0 --ranks 2",
    "cold --seeds 0 --sweeps 2",
)

DATA = Path(os.environ.get("FISHERFOLD_DATA", "data"))
PAIR = ["user", "item"]


def load(name: str) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Ratings, features of users and features of films."""
    if name == "100k":
        z = np.load(DATA / "movielens100k.npz")
        columns = {
            "user": "user_id",
            "item": "item_id",
            "rating": "rating",
            "at": "timestamp",
            "fold": "test_fold",
        }
        ratings = pd.DataFrame({new: z[old].astype(int) for new, old in columns.items()})
        users = pd.read_csv(
            DATA / "movielens100k_users.dat",
            sep="|",
            names=["user", "age", "gender", "job", "zip"],
            encoding="latin-1",
        )
        users["group"] = pd.cut(users["age"], [0, 18, 25, 35, 45, 50, 56, 120]).astype(str)
        lines = [
            line.split("|")
            for line in (DATA / "movielens100k_items.dat").read_text("latin-1").splitlines()
        ]
        items = pd.DataFrame(
            {
                "item": [int(line[0]) for line in lines],
                "year": [float(line[2][-4:]) if line[2] else math.nan for line in lines],
                "genres": [
                    "|".join(str(k) for k, flag in enumerate(line[5:24]) if flag == "1")
                    for line in lines
                ],
            }
        )
        users = users.drop(columns="zip")
    else:
        z = np.load(DATA / "movielens1m.npz")
        ratings = pd.DataFrame(
            {"user": z["user_id"], "item": z["movie_id"], "rating": z["rating"]}
        ).astype(int)
        lines = [
            line.split("::") for line in (DATA / "movielens1m_users.dat").read_text().splitlines()
        ]
        users = pd.DataFrame(lines, columns=["user", "gender", "group", "job", "zip"])
        users["zip"] = users["zip"].str[:2]
        lines = [
            line.split("::")
            for line in (DATA / "movielens1m_movies.dat").read_text("latin-1").splitlines()
        ]
        items = pd.DataFrame(lines, columns=["item", "title", "genres"])
        items["year"] = items.pop("title").str.extract(r"\((\d{4})\)$")[0].astype(float)
        users["user"] = users["user"].astype(int)
        items["item"] = items["item"].astype(int)
    items["half"] = (items["year"] // 5).astype(str)
    return ratings, users, items


def fit_and_test(
    train, test, rank, *, features=None, timed=False, likelihood="gaussian"
) -> dict[str, float]:
    """Fit, and what the held-out ratings say."""
    given = (
        {} if features is None else {"row_features": features[0], "column_features": features[1]}
    )
    began = time.process_time()
    model = MatrixCompletion(rank, likelihood=likelihood, n_jobs=1)
    model.fit(train, columns=(*PAIR, "rating"), time="at" if timed else None, **given)
    seconds = time.process_time() - began
    y = test["rating"].to_numpy(float)
    asked = {"time": test["at"] if timed else None}
    mean, std = model.predict(test[PAIR], return_std=True, **asked)
    error = mean - y
    low, high = model.predict_interval(test[PAIR], 0.9, **asked)
    found = {
        "rmse": math.sqrt(np.mean(error**2)),
        "covered": np.mean((low <= y) & (y <= high)),
        "cpu": seconds,
    }
    found["z"] = math.sqrt(np.mean((error / std) ** 2))
    if likelihood != "gaussian":
        found |= of_categories(
            model.predict_proba(test[PAIR], **asked), y[:, None] == model.categories_
        )
    return found


def of_categories(chance, hit) -> dict[str, float]:
    """Calibration and log likelihood of the probabilities of categories."""
    position = (
        np.cumsum(chance, axis=1)[hit] - np.random.default_rng(0).random(len(hit)) * chance[hit]
    )
    place = np.minimum((chance * 10).astype(int), 9) + 10 * np.arange(chance.shape[1])
    gaps = np.bincount(place.ravel(), (chance - hit).ravel())
    return {
        "covered": np.mean(np.abs(position - 0.5) < 0.45),
        "off": np.abs(chance.mean(0) - hit.mean(0)).max(),
        "ece": np.abs(gaps).sum() / chance.size,
        "log": np.log(chance[hit]).mean(),
    }


def show(name: str, runs: list[dict[str, float]]) -> None:
    mean = {key: np.mean([run[key] for run in runs]) for key in runs[0]}
    spread = np.std([run["rmse"] for run in runs], ddof=1) if len(runs) > 1 else math.nan
    each = " ".join(f"{run['rmse']:.4f}" for run in runs)
    more = (
        f"  prob. off {mean['off']:.3f}  ece {mean['ece']:.4f}  log lik. {mean['log']:.4f}"
        if "off" in mean
        else ""
    )
    figures = (
        f"{mean['rmse']:.4f} ±{spread:.4f}  90 %: {mean['covered']:.3f}  cpu {mean['cpu']:5.1f}"
    )
    more = (f"  error/std {mean['z']:.3f}" if "z" in mean else "") + more
    print(f"{name:34} {figures}{more}  [{each}]", flush=True)


def ablation(folds: list[int], rank: int | str) -> None:
    ratings, *features = load("100k")
    for name, options in {
        "nothing": {},
        "features": {"features": features},
        "time": {"timed": True},
        "ordered": {"likelihood": "ordered"},
        "features, time": {"features": features, "timed": True},
        "features, ordered": {"features": features, "likelihood": "ordered"},
        "features, time, ordered": {"features": features, "timed": True, "likelihood": "ordered"},
    }.items():
        parts = [
            (ratings[ratings["fold"] != fold], ratings[ratings["fold"] == fold]) for fold in folds
        ]
        show(
            f"100K rank {rank} {name}",
            [fit_and_test(train, test, rank, **options) for train, test in parts],
        )


def ml1m(seeds: list[int], ranks: list[int | str]) -> None:
    ratings, *features = load("1m")
    tenth = len(ratings) // 10
    for rank in ranks:
        for name, options in {
            "nothing": {},
            "features": {"features": features},
            "features, ordered": {"features": features, "likelihood": "ordered"},
        }.items():
            runs = []
            for seed in seeds:
                order = np.random.default_rng(seed).permutation(len(ratings))
                runs.append(
                    fit_and_test(
                        ratings.iloc[order[tenth:]], ratings.iloc[order[:tenth]], rank, **options
                    )
                )
            show(f"1M rank {rank} {name}", runs)


def myfm_blocks(train, test, features, *, identity=(True, True), sets=True):
    """What myFM calls relations.

    Ids, rated sets over the root of their size, and features, for both parts.
    """
    import myfm
    import scipy.sparse as sp

    columns = []
    shapes = []
    blocks = []
    for k, (key, frame) in enumerate(zip(PAIR, features, strict=True)):
        ids = np.unique(np.concatenate([train[key], test[key], frame[key]]))
        known = np.searchsorted(ids, train[key].unique())
        table = frame.set_index(key).reindex(ids)
        parts = [
            sp.csr_matrix(
                table[name].str.get_dummies("|")
                if name == "genres"
                else pd.get_dummies(table[name])
            )
            for name in table
            if name != "age"
        ]
        if identity[k]:
            parts.append(
                sp.csr_matrix(
                    (np.ones(len(known)), (known, np.arange(len(known)))), (len(ids), len(known))
                )
            )
        if sets:
            others, place = np.unique(train[PAIR[1 - k]], return_inverse=True)
            rated = sp.csr_matrix((np.ones(len(train)), (np.searchsorted(ids, train[key]), place)))
            rated.resize(len(ids), len(others))
            parts.append(sp.diags(1 / np.sqrt(np.maximum(rated.sum(1).A1, 1))) @ rated)
        shapes += [part.shape[1] for part in parts]
        columns.append((ids, sp.hstack(parts, "csr").astype(float)))
    for part in (train, test):
        found = []
        for key, (ids, table) in zip(PAIR, columns, strict=True):
            used, place = np.unique(np.searchsorted(ids, part[key]), return_inverse=True)
            found.append(myfm.RelationBlock(place.tolist(), table[used]))
        blocks.append(found)
    return blocks, shapes


def fit_myfm(
    train, test, features, rank, sweeps, *, ordered=False, timed=False, **options
) -> dict[str, float]:
    """Fit myFM, and what the held-out ratings say."""
    import myfm
    import scipy.sparse as sp

    began = time.process_time()
    blocks, shapes = myfm_blocks(train, test, features, **options)
    days = [None, None]
    if timed:
        names = np.unique(train["at"] // 86400)
        days = [
            sp.csr_matrix((part["at"].to_numpy()[:, None] // 86400 == names).astype(float))
            for part in (train, test)
        ]
        shapes = [len(names), *shapes]
    y = train["rating"].to_numpy(float)
    target = test["rating"].to_numpy(float)
    kind = myfm.MyFMOrderedProbit if ordered else myfm.MyFMGibbsRegressor
    model = kind(rank=rank, random_seed=0)
    given = {"n_iter": sweeps, "group_shapes": shapes, "X_rel": blocks[0]}
    model.fit(
        days[0], y.astype(int) - 1 if ordered else y, n_kept_samples=min(sweeps - 10, 300), **given
    )
    seconds = time.process_time() - began
    if not ordered:
        error = np.clip(model.predict(days[1], blocks[1]), 1, 5) - target
        return {"rmse": math.sqrt(np.mean(error**2)), "covered": math.nan, "cpu": seconds}
    chance = model.predict_proba(days[1], blocks[1])
    stars = np.arange(1.0, 6)
    error = chance @ stars - target
    return {"rmse": math.sqrt(np.mean(error**2)), "covered": 0, "cpu": seconds} | of_categories(
        chance, target[:, None] == stars
    )


def myfm_beside(names: list[str], sweeps: int) -> None:
    for name in names:
        rank, its_rank = (
            (20, 10) if name == "100k" else (40, 32)
        )  # the latter are those of its published figures
        ratings, *features = load(name)
        if name == "100k":
            train, test = (ratings[(ratings["fold"] == 1) == held] for held in (False, True))
        else:
            order = np.random.default_rng(0).permutation(len(ratings))
            tenth = len(ratings) // 10
            train = ratings.iloc[order[tenth:]]
            test = ratings.iloc[order[:tenth]]
        timed = name == "100k"
        for kind in ("gaussian", "ordered"):
            run = fit_and_test(train, test, rank, features=features, timed=timed, likelihood=kind)
            show(f"{name} rank {rank} fisherfold, {kind}", [run])
        for ordered in (False, True):
            run = fit_myfm(train, test, features, its_rank, sweeps, ordered=ordered, timed=timed)
            show(
                f"{name} rank {its_rank} myFM, {'ordered' if ordered else 'gaussian'}, {sweeps} "
                "sweeps",
                [run],
            )


def cmfrec_cold(train, test, features, side: str) -> dict[str, float]:
    """The error of cmfrec with side information on members without ratings."""
    from cmfrec import CMF
    from sklearn.preprocessing import StandardScaler

    from fisherfold.completion.inference.features import encode_features

    tables = [
        encode_features(given, name)
        for given, name in zip(features, ("row", "column"), strict=True)
    ]
    frames = []
    for table, key in zip(tables, ("UserId", "ItemId"), strict=True):
        frame = pd.DataFrame(StandardScaler().fit_transform(table.table)).rename(columns=str)
        frames.append(frame.assign(**{key: np.asarray(table.ids)}))
    began = time.process_time()
    long = train.rename(columns={"user": "UserId", "item": "ItemId", "rating": "Rating"})
    users, items = frames
    known = [
        frame[frame[key].isin(long[key])] for frame, key in ((users, "UserId"), (items, "ItemId"))
    ]
    model = CMF(k=10, lambda_=10.0, nthreads=1, verbose=False, use_float=True)
    model.fit(long[["UserId", "ItemId", "Rating"]], U=known[0], I=known[1])
    seconds = time.process_time() - began
    if side == "item":
        new = items.set_index("ItemId").loc[test["item"]].to_numpy()
        predicted = model.predict_new(test["user"].to_numpy(), I=new)
    else:
        new = users.set_index("UserId").loc[test["user"]].to_numpy()
        predicted = model.predict_cold_multiple(test["item"].to_numpy(), U=new)
    error = np.clip(predicted, 1, 5) - test["rating"]
    return {"rmse": math.sqrt(np.mean(error**2)), "covered": math.nan, "cpu": seconds}


def cold(names: list[str], seeds: list[int], sweeps: int) -> None:
    for name in names:
        ratings, *features = load(name)
        for side, other in (PAIR, PAIR[::-1]):
            parts = []
            for seed in seeds:
                ids = np.random.default_rng(seed).permutation(ratings[side].unique())
                held = ratings[side].isin(ids[: len(ids) // 10])
                test = ratings[held]
                parts.append((ratings[~held], test[test[other].isin(ratings[~held][other])]))
            label = f"{name} cold {side}s"
            for kind, options in {
                "nothing": {},
                "features": {"features": features},
                "ordered": {"features": features, "likelihood": "ordered"},
            }.items():
                show(f"{label} {kind}", [fit_and_test(*part, 20, **options) for part in parts])
            try:
                show(
                    f"{label} cmfrec, side information",
                    [cmfrec_cold(*part, features, side) for part in parts],
                )
                # what LightFM is: ids and features share one factorisation machine
                for kind, identity in (
                    ("ids and features", (True, True)),
                    ("features", (False, False)),
                ):
                    options = {"identity": identity, "sets": False}
                    runs = [fit_myfm(*part, features, 10, sweeps, **options) for part in parts]
                    show(f"{label} myFM, {kind}, {sweeps} sweeps", runs)
            except ImportError as error:
                print(left_out(error))


def tune() -> None:
    for name, ranks in (("100k", (10, 20, 30, 40)), ("1m", (20, 40, 60))):
        ratings, *features = load(name)
        if name == "100k":
            part = ratings[ratings["fold"] != 1]
        else:
            order = np.random.default_rng(0).permutation(len(ratings))
            part = ratings.iloc[order[len(ratings) // 10 :]]
        held = np.random.default_rng(1).random(len(part)) < 0.1
        for rank in ranks:
            for likelihood in ("gaussian", "ordered"):
                run = fit_and_test(
                    part[~held], part[held], rank, features=features, likelihood=likelihood
                )
                show(f"{name} validation, rank {rank} {likelihood}", [run])


def _rank(text: str) -> int | str:
    return "auto" if text == "auto" else int(text)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=("ablation", "ml1m", "cold", "myfm", "tune"))
    parser.add_argument("--folds", default="1,2,3,4,5")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--ranks", default="auto", help="numbers with commas, or auto")
    parser.add_argument("--rank", type=_rank, default="auto", help="a number or auto")
    parser.add_argument("--data", default="100k,1m")
    parser.add_argument("--sweeps", type=int, default=512, help="of myFM")


def main(given: Namespace) -> None:
    warnings.simplefilter("ignore", UserWarning)
    numbers = {name: integers(getattr(given, name)) for name in ("folds", "seeds")}
    if given.what == "ablation":
        ablation(numbers["folds"], given.rank)
    elif given.what == "ml1m":
        ml1m(numbers["seeds"], [_rank(rank) for rank in given.ranks.split(",")])
    elif given.what == "cold":
        cold(given.data.split(","), numbers["seeds"], given.sweeps)
    elif given.what == "myfm":
        myfm_beside(given.data.split(","), given.sweeps)
    else:
        tune()
