"""Real films: accuracy against baselines, coverage, recommendations for two people."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import sparse, stats
from sklearn.decomposition import TruncatedSVD

from fisherfold.completion import MatrixCompletion
from fisherfold.completion.metrics import rmse
from fisherfold.threads import one_thread

Floats = NDArray[np.float64]
RANK = 10
LEVEL = 0.8
LEAST_RATINGS = 20  # of a film that is recommended
NEW_PERSON = {
    "Toy Story (1995)": 5.0,
    "Finding Nemo (2003)": 5.0,
    "Shrek (2001)": 4.5,
    "Matrix, The (1999)": 2.0,
    "Silence of the Lambs, The (1991)": 1.5,
}
_PLAIN = pl.col("title").str.replace_all(r" \([^()]*[^()\d][^()]*\)", "")
_SPOKEN = _PLAIN.str.replace(r"^(.*), (The|A|An) (\(\d{4}\))$", "$2 $1 $3")


@dataclass(frozen=True)
class Films:
    """What the demo shows of films: tables of accuracy and of recommendations, and calibration."""

    ratings: int
    people: int
    films: int
    person: int
    accuracy: pl.DataFrame
    favourites: pl.DataFrame
    recommended: pl.DataFrame
    new_person: pl.DataFrame
    new_recommended: pl.DataFrame
    held_out: tuple[Floats, Floats, Floats]  # values, predictions, standard deviations
    model: MatrixCompletion  # fitted to all ratings
    titles: pl.DataFrame  # of the films, as people say them


def read_films(folder: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ratings and titles from a folder in the format of MovieLens."""
    return pl.read_csv(folder / "ratings.csv"), pl.read_csv(folder / "movies.csv")


def recommend_films(ratings: pl.DataFrame, movies: pl.DataFrame, *, seed: int = 0) -> Films:
    """Judge a fit on a held-out tenth of the ratings, then recommend with a fit to all of them."""
    generator = np.random.default_rng(seed)
    ratings = ratings.select("userId", "movieId", "rating")
    held = generator.random(ratings.height) < 0.1
    train = ratings.filter(~held)
    test = ratings.filter(held)
    with one_thread():
        accuracy, held_out = _judged(train, test)
        model = MatrixCompletion(RANK, random_state=seed).fit(ratings)
        often = ratings.group_by("movieId").len().filter(pl.col("len") >= LEAST_RATINGS)["movieId"]
        person = int(ratings.group_by("userId").len().sort("len", "userId")["userId"][-61])
        favourites = (
            ratings.filter(userId=person)
            .sort("rating", "movieId", descending=[True, False])
            .head(6)
        )
        recommended = model.recommend(person, 10, candidates=often)
        known = dict(movies.select("title", "movieId").iter_rows())
        given = {known[title]: value for title, value in NEW_PERSON.items()}
        new = model.recommend_new(given, 10, candidates=often)
        wanted = new["movieId"].to_list()
        expected = model.predict_new(list(given), list(given.values()), wanted, return_std=True)
        pairs = [(person, film) for film in recommended["movieId"]]
        mean = model.predict(pairs, return_std=True)
    return Films(
        ratings.height,
        ratings["userId"].n_unique(),
        ratings["movieId"].n_unique(),
        person,
        accuracy,
        _titled(favourites, movies),
        _with_interval(recommended, mean, movies),
        pl.DataFrame({"title": list(NEW_PERSON), "rating": list(NEW_PERSON.values())}).with_columns(
            title=_SPOKEN
        ),
        _with_interval(new, expected, movies),
        held_out,
        model,
        _titled(movies.select("movieId"), movies).select("movieId", "title"),
    )


def _judged(
    train: pl.DataFrame, test: pl.DataFrame
) -> tuple[pl.DataFrame, tuple[Floats, Floats, Floats]]:
    y = test["rating"].to_numpy()
    rows: list[tuple[str, float, float | None, float]] = []
    for name, predict in BASELINES.items():
        began = time.perf_counter()
        rows.append((name, rmse(y, np.clip(predict(train, test), 0.5, 5.0)), None, _since(began)))
    began = time.perf_counter()
    model = MatrixCompletion(RANK).fit(train)
    mean, std = model.predict(test.select("userId", "movieId"), return_std=True)
    seconds = _since(began)
    inside = float((np.abs(y - mean) <= stats.norm.ppf(0.5 + LEVEL / 2) * std).mean())
    rows.append(("fisherfold MatrixCompletion", rmse(y, mean), round(100 * inside, 1), seconds))
    columns = ["method", "held-out RMSE", "80 % intervals hold (%)", "seconds"]
    return pl.DataFrame(rows, schema=columns, orient="row"), (y, mean, std)


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def _popularity(train: pl.DataFrame, test: pl.DataFrame) -> Floats:
    means = train.group_by("movieId").agg(pl.col("rating").mean().alias("mean"))
    joined = test.join(means, on="movieId", how="left", maintain_order="left")
    return joined["mean"].fill_null(train["rating"].mean()).to_numpy()


def _offsets(train: pl.DataFrame, test: pl.DataFrame, rounds: int = 5) -> Floats:
    """Mean, film and person offsets, each shrunk by five ratings, fitted in turns."""
    level = float(train["rating"].to_numpy().mean())
    offsets = {"movieId": pl.DataFrame(), "userId": pl.DataFrame()}

    def total(frame: pl.DataFrame, keys: list[str]) -> Floats:
        found = np.full(frame.height, level)
        for key in keys:
            if offsets[key].height:
                joined = frame.join(offsets[key], on=key, how="left", maintain_order="left")
                found += joined["offset"].fill_null(0.0).to_numpy()
        return found

    for _ in range(rounds):
        for key, other in (("movieId", "userId"), ("userId", "movieId")):
            rest = train.with_columns(left=pl.col("rating") - total(train, [other]))
            offsets[key] = rest.group_by(key).agg(offset=pl.col("left").sum() / (pl.len() + 5))
    return total(test, ["movieId", "userId"])


def _truncated_svd(train: pl.DataFrame, test: pl.DataFrame) -> Floats:
    """scikit-learn's TruncatedSVD of what the offsets leave, missing entries as zeros."""
    left = train["rating"].to_numpy() - _offsets(train, train)
    people, films = (int(max(train[c].max(), test[c].max())) + 1 for c in ("userId", "movieId"))  # type: ignore[arg-type, type-var]
    matrix = sparse.csr_matrix((left, (train["userId"], train["movieId"])), shape=(people, films))
    svd = TruncatedSVD(RANK, random_state=0)
    u = svd.fit_transform(matrix)
    i = test["userId"].to_numpy()
    j = test["movieId"].to_numpy()
    return _offsets(train, test) + (u[i] * svd.components_.T[j]).sum(1)


def _cmfrec(train: pl.DataFrame, test: pl.DataFrame) -> Floats:
    """Alternating least squares of cmfrec, with a penalty that suits these data."""
    rows, columns, values = (train[c].to_numpy() for c in ("userId", "movieId", "rating"))
    rated = sparse.coo_matrix((values, (rows, columns)))
    model = cmfrec.CMF(
        RANK,
        lambda_=14.0,
        method="als",
        use_cg=False,
        niter=10,
        nthreads=1,
        verbose=False,
        random_state=0,
    )
    i = test["userId"].to_numpy()
    j = test["movieId"].to_numpy()
    known = np.isin(i, rows) & np.isin(j, columns)
    predicted = _offsets(train, test)
    predicted[known] = model.fit(rated).predict(i[known], j[known])
    return predicted


BASELINES = {
    "mean of the film": _popularity,
    "offsets of film and person": _offsets,
    "offsets + scikit-learn TruncatedSVD": _truncated_svd,
}
with suppress(ImportError):
    cmfrec = import_module("cmfrec")
    BASELINES["cmfrec, alternating least squares"] = _cmfrec


def _titled(frame: pl.DataFrame, movies: pl.DataFrame) -> pl.DataFrame:
    """With titles as people say them: the article in front, no second title."""
    return frame.join(
        movies.select("movieId", title=_SPOKEN), on="movieId", how="left", maintain_order="left"
    )


def _with_interval(found: Any, predicted: Any, movies: pl.DataFrame) -> pl.DataFrame:
    mean, std = predicted
    half = stats.norm.ppf(0.5 + LEVEL / 2) * std
    low = np.clip(mean - half, 0.5, 5.0)
    high = np.clip(mean + half, 0.5, 5.0)
    return _titled(found, movies).with_columns(
        expected=pl.Series(mean), low=pl.Series(low), high=pl.Series(high)
    )
