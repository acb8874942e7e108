"""``fisherfold demo``: films, a network and a constrained model, in under a minute."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fisherfold.cli.voice import Voice, grid, typed
from fisherfold.extras import need
from fisherfold.progress import track

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

FILMS = Path("examples/data/movielens_small")


def demo(
    voice: Voice,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where picture and page go.")
    ] = Path("demo-output"),
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="A folder with ratings.csv and movies.csv in the format of MovieLens."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed of splits and starts.")] = 0,
) -> None:
    """Recommend films with intervals, train a network, fit a model on a manifold."""
    need("matplotlib")
    from fisherfold.demo import (
        draw,
        race_gradients,
        race_networks,
        read_films,
        recommend_films,
        write_page,
    )
    from fisherfold.files import make_folder, write_atomically

    folder = _find(data)
    make_folder(output)
    with track("films", 3) as line:
        films = recommend_films(*read_films(folder), seed=seed)
        line.update(1, what="a network")
        networks = race_networks()
        line.update(2, what="a model on a manifold")
        gradients = race_gradients(seed=seed)
    picture = output / "demo.png"
    page = output / "index.html"
    drawn = draw(films, networks, gradients)
    write_atomically(picture, drawn)
    write_page(films, drawn, page)
    model = output / "model"
    titles = output / "titles.csv"
    films.model.save(model)
    write_atomically(titles, films.titles.write_csv().encode())
    serve = f"{typed(_program())} serve {typed(model)} --titles {typed(titles)}"
    races = {
        name: [{"method": r.method, "seconds": r.seconds[-1], "value": r.values[-1]} for r in found]
        for name, found in (
            ("network, test accuracy", networks),
            ("manifold, loss above the minimum", gradients),
        )
    }
    facts = {
        "accuracy": films.accuracy.to_dicts(),
        "recommended": films.recommended.to_dicts(),
        **races,
    }
    voice.answer(
        {**facts, "picture": picture, "page": page, "serve": serve},
        _accuracy(films.accuracy),
        _films(f"For person {films.person}", films.recommended),
        _films("For somebody new who rated five films", films.new_recommended),
        _races(races),
        f"picture: {picture}",
        f"page with real titles: {page}",
        f"rate films yourself, on a page at http://127.0.0.1:8000/: {serve}",
    )


def _program() -> str:
    """The command as a shell finds it."""
    if shutil.which("fisherfold") is not None:
        return "fisherfold"
    return os.path.relpath(Path(sys.executable).with_name("fisherfold"))


def _find(given: Path | None) -> Path:
    source = Path(__file__).parents[3] / FILMS
    named = [
        Path(root) / "movielens_small" for root in filter(None, [os.environ.get("FISHERFOLD_DATA")])
    ]
    places = [given] if given is not None else [FILMS, source, *named]
    for place in places:
        if (place / "ratings.csv").is_file() and (place / "movies.csv").is_file():
            return place
    raise FileNotFoundError(
        "the demo needs ratings.csv and movies.csv of MovieLens ml-latest-small, looked for in "
        f"{places[0]}: run it in "
        "a clone of the repository, or name a folder with --data"
    )


def _accuracy(frame: pl.DataFrame) -> Table:
    rows = (
        [name, f"{rmse:.4f}", inside and f"{inside:.1f}", f"{s:.2f}"]
        for name, rmse, inside, s in frame.rows()
    )
    return grid("Held-out ratings (stars, a random tenth)", frame.columns, rows)


def _films(title: str, frame: pl.DataFrame) -> Table:
    found = frame.select("title", "expected", "low", "high").iter_rows()
    rows = ([film, f"{mean:.1f}", f"{low:.1f} to {high:.1f}"] for film, mean, low, high in found)
    return grid(title, ("film", "expected", "80 % interval"), rows)


def _races(races: dict[str, list[dict[str, Any]]]) -> Table:
    rows = (
        [problem, row["method"], f"{row['seconds']:.2f}", f"{row['value']:.4g}"]
        for problem, found in races.items()
        for row in found
    )
    return grid("Races on wall time", ("problem", "method", "seconds", "reached"), rows, text=2)
