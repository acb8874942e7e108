"""``fisherfold complete evaluate``: held-out errors and ranking metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import Columns, File, Model, app
from fisherfold.cli.complete.tables import account, entries_of, load, read_more
from fisherfold.cli.options import SkipBadLines
from fisherfold.cli.voice import Voice
from fisherfold.progress import track

if TYPE_CHECKING:
    from fisherfold.completion.entries import Entries

_MEANING_OF_ERRORS = (
    "rmse and mae are root mean square and mean absolute errors, in units of the ratings; 90 % "
    "intervals that are right cover 0.9 (more for ordered ratings)"
)
_MEANING_OF_LISTS = (
    "the measures @{} are of recommended lists of that length, 1 at best except novelty (mean bits)"
)
_TOP = 10


@command(
    app,
    examples=[
        "fisherfold complete evaluate ratings.csv --rank 10 --folds 5",
        "fisherfold complete evaluate ratings.csv --split time --time-column timestamp --top 10",
        "fisherfold complete evaluate train.csv --test test.csv --column-features films.csv",
        "fisherfold complete evaluate plays.csv --implicit --split random --rank 32",
        "fisherfold complete evaluate test.csv --model model/",
    ],
)
def evaluate(
    voice: Voice,
    file: File,
    *,
    model: Model,
    folds: Annotated[
        int, typer.Option("--folds", min=2, help="The number of random folds.", metavar="N")
    ] = 5,
    test: Annotated[
        Path | None, typer.Option(help="Ratings to predict, in place of folds.")
    ] = None,
    split: Annotated[
        Literal["folds", "time", "last", "random"],
        typer.Option(
            help="folds, or one split: time (the latest tenth), last (the last rating of each "
            "row), random.",
        ),
    ] = "folds",
    saved: Annotated[
        Path | None, typer.Option("--model", help="A fitted model to evaluate on the file.")
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also metrics of lists of this length; 10 if implicit.", metavar="N"
        ),
    ] = None,
    relevant: Annotated[
        float | None,
        typer.Option(help="For --top: the least rating that counts; the mean if not given."),
    ] = None,
    reading: Columns,
    skip_bad_lines: SkipBadLines = False,
) -> None:
    """Held-out errors: over random folds, on a later part, on a test file, or of a saved model."""
    import numpy as np

    if split in ("time", "last") and model.time_column is None:
        raise ValueError(f"--split {split} needs --time-column")
    if saved is not None and (
        replace(model, time_column=None) != Model() or test is not None or split != "folds"
    ):
        raise ValueError(
            "with --model the file is what is predicted: options of fits and splits have no meaning"
        )

    def answer(title: str, found: dict[str, Any]) -> None:
        voice.result(title, found)
        of_lists = _MEANING_OF_LISTS.format(top or _TOP) if top is not None or not errors else ""
        voice.remark("; ".join(part for part in (errors, of_lists) if part))

    errors = _MEANING_OF_ERRORS
    if saved is not None:
        fitted = load(saved)
        table = read_more(file, reading, fitted, skip_bad_lines, time=model.time_column)
        errors = "" if fitted.model_.inference == "implicit" else errors
        found = (
            {"file": str(file)} | account(table) | _scores(fitted, entries_of(table), top, relevant)
        )
        answer(f"Errors on {file.name}", found)
        return
    errors, fitted = "" if model.implicit else errors, model.estimator()
    table, entries, known = model.read(file, reading, skip_bad_lines)
    found = {"file": str(file)} | account(table)
    if test is not None:
        fitted.fit_entries(entries, known)
        more = read_more(test, reading, fitted, skip_bad_lines, time=model.time_column)
        found |= {"test": str(test), "rank": fitted.model_.posterior.rank}
        answer(
            f"Errors on {test.name}",
            found | _scores(fitted, entries_of(more), top, relevant),
        )
        return
    count = len(entries.values)
    if split in ("folds", "random") and fitted.merge_rule in ("last", "sum"):
        entries = entries.merged(fitted.merge_rule)
    parts = _parts(split, folds, entries, model.seed)
    if split in ("folds", "random"):
        found["merged"] = count - int(entries.pair_numbers().max()) - 1
    scores = []
    with track("evaluating", len(parts)) as line:
        for train, held in parts:
            fitted.fit_entries(entries.at(train), known)
            score = _scores(fitted, entries.at(held), top, relevant)
            scores.append({"rank": fitted.model_.posterior.rank} | score)
            line.advance()
    found |= {"held out": len(parts[0][1])} if len(parts) == 1 else {"folds": folds}
    for name in scores[0]:
        values = [score[name] for score in scores]
        if len(parts) == 1 or name == "rank":
            found[name] = values[0] if len(set(values)) == 1 else values
        else:
            error = float(np.std(values, ddof=1) / np.sqrt(folds))
            found[name] = {"mean": float(np.mean(values)), "standard error": error}
    answer(f"Held-out errors on {file.name}", found)


def _parts(split: str, folds: int, entries: Entries, seed: int) -> list[Any]:
    """Positions of the training and of the held-out entries; random parts hold out whole pairs."""
    import numpy as np

    from fisherfold.completion import splits

    if split == "time":
        return [splits.time_split(entries.times)]
    if split == "last":
        return [splits.last_out_split(entries.rows, entries.times)]
    pair = entries.pair_numbers()
    n = int(pair.max()) + 1
    if split == "random":
        held = np.zeros(n, dtype=bool)
        held[splits.random_split(n, seed=seed)[1]] = True
        return [(np.flatnonzero(~held[pair]), np.flatnonzero(held[pair]))]
    if folds > n:
        raise ValueError(f"--folds must be at most the number of ratings, {n}, got {folds}")
    fold = (np.random.default_rng(seed).permutation(n) % folds)[pair]
    return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(folds)]


def _scores(model: Any, held: Entries, top: int | None, relevant: float | None) -> dict[str, float]:
    """Errors of predictions, what the 90 % intervals cover, and metrics of ranked lists."""
    import numpy as np

    from fisherfold.completion import metrics

    inside, wanted = model.model_, held
    found: dict[str, float] = {}
    i, j = inside.locate(held.rows, "row", "prior"), inside.locate(held.columns, "column", "prior")
    if (seen := inside.seen) is not None:
        n = len(inside.column_ids)
        twice = (i >= 0) & (j >= 0) & np.isin(i * n + j, seen.rows * n + seen.columns)
        if twice.any():  # their errors are too small, and lists leave them out
            found["already in the fit"] = int(twice.sum())
    if inside.inference != "implicit":
        pairs = inside.pairs(i, j, held.times)
        mean = pairs.predict(clip=model.clip)
        found |= {"rmse": metrics.rmse(held.values, mean), "mae": metrics.mae(held.values, mean)}
        if inside.inference == "variational":
            low, high = pairs.intervals(0.9, clip=False)
            found["covered by 90 % intervals"] = float(
                np.mean((low <= held.values) & (held.values <= high))
            )
        wanted = held.at(np.flatnonzero(held.values > model.offset_))
    if relevant is not None:
        wanted = held.at(np.flatnonzero(held.values >= relevant))
    if top is None and inside.inference == "implicit":
        top = _TOP
    if top is not None:
        lists = model.recommend(np.unique(wanted.rows), top)
        trained = seen and (
            inside.row_ids.decode(seen.rows),
            inside.column_ids.decode(seen.columns),
        )
        known = metrics.ranking_metrics(lists, (wanted.rows, wanted.columns), top, trained=trained)
        found |= {f"{name}@{top}": value for name, value in known.items()}
    return found
