"""Small made-up data in the files of the real sets, for smoke runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

USERS = 120
FILMS = 80
JOBS = ("artist", "doctor", "student", "writer")
GENRES = ("Action", "Comedy", "Drama", "Children's")
PEOPLE = 200
JOKES = 30
CIFAR_IMAGES = 100  # of each of the six files
# seconds since 1970 of the first rating, and how many there are in a day
FIRST = 880_000_000
DAY = 86_400


def write_data(folder: Path) -> Path:
    """Write every data set that the benchmarks read, small, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    _movielens(folder, rng)
    _jester(folder, rng)
    _tasks(folder, rng)
    _gowalla(folder, rng)
    _cifar(folder, rng)
    _released_code(folder.parent / "anchors" / "authors_octave", rng)
    return folder


def _low_rank(rng: np.random.Generator, rows: int, columns: int) -> Any:
    factors = rng.normal(size=(rows, 3)) @ rng.normal(size=(3, columns))
    return factors / factors.std() + 0.3 * rng.normal(size=(rows, columns))


def _movielens(folder: Path, rng: np.random.Generator) -> None:
    stars = np.clip(np.round(3.5 + _low_rank(rng, USERS, FILMS)), 1, 5)
    seen = rng.random((USERS, FILMS)) < np.linspace(0.6, 0.1, FILMS)
    seen[:, 0] = True  # everyone and every film has a rating
    seen[0] = True
    users, films = np.nonzero(seen)
    order = rng.permutation(len(users))
    users = users[order]
    films = films[order]
    rating = stars[users, films].astype(np.uint8)
    times = (FIRST + rng.integers(0, 400 * DAY, len(users))).astype(np.int32)
    np.savez(
        folder / "movielens100k.npz",
        user_id=(users + 1).astype(np.uint16),
        item_id=(films + 1).astype(np.uint16),
        rating=rating,
        timestamp=times,
        test_fold=(1 + np.arange(len(users)) % 5).astype(np.uint8),
    )
    np.savez(
        folder / "movielens1m.npz",
        user_id=(users + 1).astype(np.uint16),
        movie_id=(films + 1).astype(np.uint16),
        rating=rating,
        shape=np.array([USERS, FILMS], np.int32),
    )
    _people_and_films(folder)
    small = folder / "movielens_small"
    small.mkdir()
    lines = [
        f"{user + 1},{film + 1},{stars:.1f},{time}"
        for user, film, stars, time in zip(users, films, rating, times, strict=True)
    ]
    _write(small / "ratings.csv", ["userId,movieId,rating,timestamp", *lines])
    titles = [f"{film + 1},Film {film} (1995),{_genre(film)}" for film in range(FILMS)]
    _write(small / "movies.csv", ["movieId,title,genres", *titles])


def _genre(film: int) -> str:
    return GENRES[film % len(GENRES)]


def _people_and_films(folder: Path) -> None:
    people = [
        (user + 1, "MF"[user % 2], (18, 25, 35, 50)[user % 4], user % len(JOBS))
        for user in range(USERS)
    ]
    _write(
        folder / "movielens100k_users.dat",
        [f"{user}|{age}|{sex}|{JOBS[job]}|55{user:03}" for user, sex, age, job in people],
    )
    _write(
        folder / "movielens1m_users.dat",
        [f"{user}::{sex}::{age}::{job}::55{user:03}" for user, sex, age, job in people],
    )
    flags = ["|".join(str(int(film % 19 == genre)) for genre in range(19)) for film in range(FILMS)]
    _write(
        folder / "movielens100k_items.dat",
        [
            f"{film + 1}|Film {film} (1995)|01-Jan-{1990 + film % 8}||http://none|{flags[film]}"
            for film in range(FILMS)
        ],
    )
    _write(
        folder / "movielens1m_movies.dat",
        [
            f"{film + 1}::Film {film} ({1990 + film % 8})::{_genre(film)}|{GENRES[film % 3]}"
            for film in range(FILMS)
        ],
    )


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")


def _jester(folder: Path, rng: np.random.Generator) -> None:
    ratings = np.clip(300 * _low_rank(rng, PEOPLE, JOKES), -999, 999).astype(np.int16)
    ratings[rng.random(ratings.shape) < 0.4] = 9900  # a joke that was not rated
    np.savez(folder / "jester1.npz", ratings_x100=ratings)


def _released_code(folder: Path, rng: np.random.Generator) -> None:
    """The split, start and samples that a run of the released code would have had."""
    folder.mkdir(parents=True)
    np.savez(
        folder / "jester_split_init.npz",
        test_user=np.arange(20),
        test_item=np.arange(20),
        U0=np.linalg.qr(rng.normal(size=(PEOPLE, 5)))[0],
        samples_rngd=rng.integers(0, JOKES, (18, 5)),
    )
    curve = {"cpu_s": list(range(19)), "train_mse": [1.0] * 19}
    (folder / "jester_rngd.json").write_text(json.dumps(curve))


def _tasks(folder: Path, rng: np.random.Generator) -> None:
    """Twelve schools and seven joints with a shared subspace, letters and molecules with labels."""
    tasks = 12
    rows = 40
    ids = np.repeat(np.arange(1, tasks + 1), rows).astype(np.uint8)
    x, y = _related(rng, ids, 28)
    np.savez(
        folder / "school.npz",
        x=x,
        y=np.clip(20 + 5 * y, 0, 70).astype(np.uint8),
        task_start=np.arange(0, tasks * rows, rows).astype(np.int32),
        **_splits(rng, len(ids)),
    )
    arm = np.repeat(np.arange(1, 8), 60).astype(np.uint8)
    x, y = _related(rng, arm, 21)
    np.savez(
        folder / "sarcos_7x2000.npz",
        x_micro=(1e6 * x).astype(np.int32),
        y_micro=(1e6 * y).astype(np.int32),
        task=arm,
        **_splits(rng, len(arm)),
    )
    table = 1e6 * rng.normal(size=(300, 28))
    table[:, 21:] += table[:, :7]
    np.savez(folder / "sarcos_test.npz", micro=table.astype(np.int32))
    for name, features in (("letter", 128), ("mhc", 180)):
        x, y = _related(rng, ids, features)
        middle = [np.median(y[ids == task]) for task in range(1, tasks + 1)]
        label = np.where(y > np.array(middle)[ids - 1], 1, -1).astype(np.int8)
        np.savez(folder / f"{name}.npz", X=x, task=ids, y=label, **_splits(rng, len(ids)))


def _related(rng: np.random.Generator, ids: Any, features: int) -> tuple[Any, Any]:
    """Features of zeros and ones, and targets from coefficients in three dimensions."""
    x = (rng.random((len(ids), features)) < 0.3).astype(np.uint8)
    basis = rng.normal(size=(features, 3))
    weights = rng.normal(size=(3, int(ids.max()) + 1))
    signal = (x @ basis * weights[:, ids].T).sum(1)
    signal = (signal - signal.mean()) / signal.std()
    return x, signal + 0.3 * rng.normal(size=len(ids))


def _splits(rng: np.random.Generator, count: int) -> dict[str, Any]:
    """Ten official splits with five folds each."""
    train = np.stack([rng.permutation(count)[: count // 3] for _ in range(10)])
    fold = np.stack([np.arange(count // 3) % 5 for _ in range(10)])
    return {"train_idx": train.astype(np.uint16), "train_fold": fold.astype(np.uint8)}


def _gowalla(folder: Path, rng: np.random.Generator) -> None:
    """Check-ins of people at places, training and test parts as matrices in rows."""
    shape = (100, 60)
    likes = _low_rank(rng, *shape) + np.linspace(1, -1, shape[1])
    train = likes > 0.8
    test = (likes > 0.3) & ~train
    for name, part in (("train", train), ("test", test)):
        np.savez(
            folder / f"gowalla_{name}.npz",
            indices=np.nonzero(part)[1].astype(np.int32),
            indptr=np.concatenate([[0], part.sum(1).cumsum()]).astype(np.int32),
            format=np.array(b"csr"),
            shape=np.array(shape, np.int32),
            data=np.ones(part.sum()),
        )


def _cifar(folder: Path, rng: np.random.Generator) -> None:
    """Noise around one colour for each class, as lossless strips of images."""
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        colours = rng.integers(40, 215, (classes, 1, 1, 3))
        for part in (*(f"train_{number}" for number in range(5)), "test"):
            labels = np.arange(CIFAR_IMAGES) % classes
            noise = rng.integers(-40, 40, (CIFAR_IMAGES, 32, 32, 3))
            pixels = (colours[labels] + noise).astype(np.uint8)
            strip = _webp(pixels.reshape(-1, 32, 3))
            np.savez(
                folder / f"{name}_{part}.npz",
                webp=np.frombuffer(strip, np.uint8),
                offsets=np.array([0, len(strip)]),
                labels=labels.astype(np.uint8),
            )


def _webp(pixels: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()
