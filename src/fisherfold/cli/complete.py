"""``fisherfold complete``: fill tables with holes, and recommend, from the command line."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fisherfold.cli.common import command, group
from fisherfold.cli.options import (
    TABLES,
    Checkpoint,
    Folder,
    Output,
    Predictions,
    Reading,
    SkipBadLines,
    Timeout,
    check_output,
    check_predictions,
    say_written,
    write_or_rescue,
)
from fisherfold.cli.voice import Voice, grid, option, typed
from fisherfold.plain import counted
from fisherfold.progress import track

if TYPE_CHECKING:
    import numpy.typing as npt

    from fisherfold.completion.base import CompletionBase
    from fisherfold.completion.entries import Entries
    from fisherfold.completion.implicit import ImplicitCompletion
    from fisherfold.completion.training import SideInformation
    from fisherfold.tables.readers import RatingTable

app = group(
    "Complete a table of ratings, readings or assays with holes, and recommend from it.",
    examples=[
        "fisherfold complete fit ratings.csv --rank 10 -o model/",
        "fisherfold complete recommend model/ 42",
    ],
)

_AUTO_RANKS, _TOP = (2, 5, 10, 20), 10
_MEANING_OF_ERRORS = (
    "rmse and mae are root mean square and mean absolute errors, in units of the ratings; 90 % intervals that are "
    "right cover 0.9 (more for ordered ratings)"
)
_MEANING_OF_LISTS = (
    "the measures @{} are of recommended lists of that length, 1 at best except novelty (mean bits)"
)

File = Annotated[
    Path,
    typer.Argument(
        help="Ratings: CSV, TSV, '::' or Parquet with row id, column id and value; - reads standard input."
    ),
]
_WEIGHTS = "The column with the importance of each value: 2 counts as two, 0.1 as a tenth of one."
_KEYS = "The column with a key of each line: updates leave out lines that come again."
_TIMES = "The column with times, numbers or dates such as 2024-05-31 18:00: rows and columns drift."


@dataclass
class Columns(Reading):
    """How a table of ratings or pairs is read."""

    columns: str | None = option(
        None,
        "By name or position, as in user,item,rating or 1,2,3.",
        "--columns",
        "-c",
        metavar="NAMES",
        panel=TABLES,
    )
    header: bool | None = option(
        None,
        "The first line names the columns, or is data; unless said, it is data if a field is a number.",
        "--header/--no-header",
        panel=TABLES,
    )

    def format(self) -> dict[str, Any]:
        """What ``fisherfold.tables.readers`` call these."""
        return super().format() | {"columns": _split(self.columns), "header": self.header}


@dataclass
class Model:
    """What is fitted, and how."""

    rank: str | None = option(
        None,
        "The number of factors, or auto (cross-validation); found on held-out values if not given.",
        "-r",
    )
    seed: int = option(0, "Seed of everything random.", "-s")
    inference: Literal["variational", "point"] = option("variational", "variational or point.")
    solver: Literal["auto", "rngd", "rngd-vr", "rcg", "rgd"] = option(
        "auto",
        "Of --inference point: auto, or a solver of the paper's problem: rngd, rngd-vr, rcg, rgd.",
    )
    offsets: Literal["both", "rows", "columns", "global", "none"] = option(
        "both", "both, rows, columns, global or none."
    )
    ridge: float | None = option(None, "Prior strength in pseudo-ratings; learnt if not given.")
    duplicates: Literal["mean", "last", "sum", "error"] | None = option(
        None, "For pairs given twice: mean (the default), last, sum (that of --implicit) or error."
    )
    max_iter: int | None = option(None, "The largest number of passes.")
    likelihood: Literal["gaussian", "ordered", "binary"] = option(
        "gaussian", "gaussian, ordered (values are steps of a scale) or binary (two values)."
    )
    row_features: Path | None = option(
        None, "A table with a column of row ids and, beside it, what is known of them."
    )
    column_features: Path | None = option(
        None, "The same for column ids; fields of several are written as a|b."
    )
    time_column: str | None = option(None, _TIMES, metavar="NAME")
    weight_column: str | None = option(None, _WEIGHTS, metavar="NAME")
    key_column: str | None = option(None, _KEYS, metavar="NAME")
    implicit: bool = option(
        False,
        "Pairs were observed (clicks, plays), values are their weights, if any; what is missing is no interest.",
    )

    def estimator(self, **more: Any) -> CompletionBase:
        """The estimator of these options."""
        from fisherfold.completion.cross_validation import MatrixCompletionCV
        from fisherfold.completion.rating_model import MatrixCompletion

        if self.implicit:
            return self._implicit(**more)
        options: dict[str, Any] = {
            "random_state": self.seed,
            "inference": self.inference,
            "solver": self.solver,
            "offsets": self.offsets,
            "likelihood": self.likelihood,
            **self._given(),
            **more,
        }
        if self.rank == "auto":
            return MatrixCompletionCV(_AUTO_RANKS, ridges=(self.ridge,), **options)
        return MatrixCompletion(ridge=self.ridge, **options, **self._rank())

    def _given(self) -> dict[str, Any]:
        """What was said of options whose defaults are the estimator's own."""
        given = {"duplicates": self.duplicates, "max_iter": self.max_iter}
        return {name: value for name, value in given.items() if value is not None}

    def _rank(self) -> dict[str, Any]:
        if self.rank is None:
            return {}
        if not (self.rank.isdecimal() or self.rank == "auto"):
            raise ValueError(
                f"--rank must be a whole number of at least 1 or auto, got {self.rank!r}"
            )
        return {"rank": int(self.rank) if self.rank.isdecimal() else "auto"}

    def _implicit(self, **more: Any) -> ImplicitCompletion:
        from fisherfold.completion.implicit import ImplicitCompletion

        for name in (
            "inference",
            "solver",
            "offsets",
            "ridge",
            "likelihood",
            "row_features",
            "column_features",
            "weight_column",
            "key_column",
        ):
            if getattr(self, name) != getattr(Model, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} is for ratings and has no meaning with --implicit"
                )
        return ImplicitCompletion(random_state=self.seed, **self._rank(), **self._given(), **more)

    def read(
        self, file: Path, reading: Columns, skip_bad_lines: bool
    ) -> tuple[RatingTable, Entries, SideInformation]:
        """The table for a fit, its entries, features and times."""
        columns = {"time": self.time_column, "weight": self.weight_column, "key": self.key_column}
        table = _read(file, reading, skip_bad_lines, implicit=self.implicit, **columns)
        entries = _entries(table)
        return table, entries, self._features(entries, reading, skip_bad_lines)

    def _features(
        self, entries: Entries, reading: Columns, skip_bad_lines: bool
    ) -> SideInformation:
        from fisherfold.completion.inference.features import encode_features
        from fisherfold.completion.training import SideInformation

        if self.implicit:
            return SideInformation()
        found = [
            None
            if file is None
            else encode_features(_features(file, name, side, reading, skip_bad_lines), side, name)
            for file, side, name in zip(
                (self.row_features, self.column_features),
                ("row", "column"),
                entries.names[:2],
                strict=True,
            )
        ]
        return SideInformation((found[0], found[1]))


Shown = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="A file for the table: .csv, .csv.gz or .parquet; - prints CSV."
    ),
]
RowFeatures = Annotated[
    Path | None, typer.Option(help="Features of rows that were not in the fit, as for fit.")
]
ColumnFeatures = Annotated[
    Path | None, typer.Option(help="Features of columns that were not in the fit, as for fit.")
]
K = Annotated[int, typer.Option("-k", min=1, help="How many for each id.", metavar="N")]


@command(
    app,
    examples=[
        "fisherfold complete fit ratings.csv --rank 10 --seed 0 -o model/",
        "fisherfold complete fit ratings.dat --separator :: --rank auto -o model/",
        "fisherfold complete fit ratings.csv --likelihood ordered --column-features films.csv -o model/",
        "fisherfold complete fit plays.csv --implicit --rank 32 -o model/",
    ],
)
def fit(
    voice: Voice,
    file: File,
    output: Output,
    *,
    model: Model,
    reading: Columns,
    skip_bad_lines: SkipBadLines = False,
    checkpoint: Checkpoint = None,
    timeout: Timeout = 300,
) -> None:
    """Fit a model to a file of ratings and write it into a folder; under torchrun its processes share the work."""
    from fisherfold.completion.files import KIND
    from fisherfold.distributed import joined, under_torchrun

    check_output(output, KIND)
    if model.implicit and model.time_column is not None:
        raise ValueError(
            "--time-column is for ratings and has no meaning for a fit with --implicit"
        )
    fitted = model.estimator(verbose=voice.verbose)
    if checkpoint is not None and not under_torchrun():
        raise ValueError("--checkpoint is for fits over several processes, under torchrun")
    if under_torchrun() and any((model.row_features, model.column_features, model.time_column)):
        raise ValueError("features and times need a fit in one process, without torchrun")
    began = time.perf_counter()
    with joined(timeout) as processes:
        if under_torchrun():
            how = reading.format() | {"decimal": reading.decimal, "skip_bad_lines": skip_bad_lines}
            fitted.fit_file_share(file, checkpoint=checkpoint, **how)
            read = {"processes": processes.size}
        else:
            table, entries, known = model.read(file, reading, skip_bad_lines)
            read, began = _account(table), time.perf_counter()
            fitted.fit_entries(entries, known)
        seconds = time.perf_counter() - began
        with processes.together():
            if processes.is_first:
                write_or_rescue(fitted.save, output)
                if checkpoint is not None:
                    checkpoint.unlink(missing_ok=True)
    if not processes.is_first:
        return
    found: dict[str, Any] = {
        "file": str(file),
        **read,
        **_size(fitted),
        "merged": fitted.n_duplicates_,
        "rank": fitted.model_.posterior.rank,
        "passes": fitted.n_iter_,
        "converged": fitted.converged_,
        **({} if model.implicit else {"noise": fitted.noise_}),
        "seconds": seconds,
        "model": str(output),
    }
    if hasattr(fitted, "cv_results_"):
        found["cv_rmse"] = dict(
            zip(map(str, fitted.cv_results_["rank"]), fitted.cv_results_["mean_rmse"], strict=True)
        )
    voice.result(f"Completed {file.name}", found)
    voice.remark(
        f"next: fisherfold complete recommend {typed(output, fitted.model_.row_ids.labels[0])}"
    )


@command(
    app,
    examples=[
        "fisherfold complete predict model/ pairs.csv -o predictions.csv",
        "fisherfold complete predict model/ - --interval 0.9 -o -",
    ],
)
def predict(
    voice: Voice,
    folder: Folder,
    pairs: Annotated[
        Path, typer.Argument(help="A table with row ids and column ids; - reads standard input.")
    ],
    *,
    output: Predictions = Path("-"),
    std: Annotated[
        bool, typer.Option("--std", help="Add the predictive standard deviation, column std.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            help="Add intervals of this probability, such as 0.9: columns low and high.",
            metavar="P",
        ),
    ] = None,
    time_column: Annotated[str | None, typer.Option(help=_TIMES, metavar="NAME")] = None,
    row_features: RowFeatures = None,
    column_features: ColumnFeatures = None,
    name: Annotated[
        str, typer.Option(help="The name of the column of predictions.", metavar="NAME")
    ] = "prediction",
    reading: Columns,
) -> None:
    """Predict pairs: the table is written with a last column `prediction`."""
    import numpy as np

    from fisherfold.tables.readers import find_columns, read_pairs
    from fisherfold.tables.writers import add_columns, write_table

    check_predictions(output, voice)
    if interval is not None and not 0 < interval < 1:
        raise ValueError(f"--interval must lie between 0 and 1, got {interval}")
    model = _load(folder)
    table, rows, columns = read_pairs(pairs, known=model.names_[:2], **reading.format())
    frame = table.frame
    more = [*(["std"] if std else []), *(["low", "high"] if interval is not None else [])]
    add_columns(frame.head(0), {each: [] for each in [name, *more]}, table.path)
    asked = {model.names_[0]: rows, model.names_[1]: columns}
    times = None if time_column is None else frame[find_columns(table, [time_column])[0]]
    known = _described(model, row_features, column_features, reading) | {"time": times}
    with track(f"predicting {counted(len(frame), 'pair', form=',')}"):
        found: Any = model.predict(asked, return_std=std, **known)
        extra = {"std": found[1], name: found[0]} if std else {name: found}
        if interval is not None:
            extra = (
                dict(
                    zip(
                        ("low", "high"),
                        model.predict_interval(asked, interval, **known),
                        strict=True,
                    )
                )
                | extra
            )
    write_table(add_columns(frame, extra, table.path), output, reading.decimal)
    inside = model.model_
    unknown = int(
        np.count_nonzero(
            (inside.row_ids.encode(rows) < 0) | (inside.column_ids.encode(columns) < 0)
        )
    )
    say_written(
        voice, "Predicted", {"pairs": len(rows), "with ids not seen in the fit": unknown}, output
    )


@command(
    app,
    examples=[
        "fisherfold complete recommend model/ 42 -k 5",
        "fisherfold complete recommend model/ --all -o lists.parquet",
        "fisherfold complete recommend model/ --rated new.csv",
    ],
)
def recommend(
    voice: Voice,
    folder: Folder,
    ids: Annotated[list[str] | None, typer.Argument(help="Row ids.")] = None,
    *,
    k: K = 10,
    everyone: Annotated[bool, typer.Option("--all", help="For all rows of the model.")] = False,
    rated: Annotated[
        Path | None,
        typer.Option(help="For new rows: a table of their row ids, column ids and values."),
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            help="A table with a column of ids to choose from; the first, if none has its name."
        ),
    ] = None,
    by: Annotated[
        Literal["mean", "upper", "sample"],
        typer.Option(help="mean, upper (bounds) or sample (of the posterior)."),
    ] = "mean",
    include_seen: Annotated[
        bool, typer.Option("--include-seen", help="Also columns that the row has rated.")
    ] = False,
    exclude: Annotated[
        Path | None, typer.Option(help="A table with a column of ids that no list may hold.")
    ] = None,
    row_features: RowFeatures = None,
    column_features: ColumnFeatures = None,
    output: Shown = None,
    reading: Columns,
) -> None:
    """List the columns with the largest predictions for some rows, for all, or for new ones."""
    import polars as pl

    from fisherfold.tables.readers import ids as typed_ids

    if (ids is None or not ids) + (not everyone) + (rated is None) != 2:
        raise ValueError("give row ids, or --all, or --rated FILE: one of the three")
    check_predictions(output, voice)
    model = _load(folder)
    if model.model_.seen is None and not include_seen and rated is None:
        raise ValueError(
            "this model does not keep the ratings it was fitted to, to leave them out: add --include-seen"
        )
    options: dict[str, Any] = {"exclude_seen": not include_seen, "by": by}
    for name, file in (("candidates", candidates), ("exclude", exclude)):
        if file is not None:
            options[name] = _candidates(file, reading, model.names_[1])
    known = _described(model, row_features, column_features, reading)
    if rated is not None:
        known["features"] = known.pop("row_features", None)
    options |= known
    with track("recommending"):
        if rated is not None:
            found = model.recommend_new(_entries(_more(rated, reading, model)), k, **options)
        else:
            found = model.recommend(
                None if everyone else typed_ids(pl.Series("ids", ids)), k, **options
            )
    unknown = (
        []
        if everyone or rated is not None
        else [t for t in ids or () if model.model_.row_ids.encode([t])[0] < 0]
    )
    if unknown:
        voice.remark(f"{', '.join(unknown)}: not in the fit; this is what does best on average")
    _show(voice, found, output, "Recommendations")


@command(app, examples=["fisherfold complete similar model/ 42 -k 5"])
def similar(
    voice: Voice,
    folder: Folder,
    ids: Annotated[list[str], typer.Argument(help="Column ids.")],
    k: K = 10,
    rows: Annotated[bool, typer.Option("--rows", help="The ids are those of rows.")] = False,
    output: Shown = None,
) -> None:
    """List the columns that are rated most like some."""
    check_predictions(output, voice)
    found = _load(folder).similar(ids, k, of="rows" if rows else "columns")
    _show(voice, found, output, "Similar")


@command(app, examples=["fisherfold complete explain model/ 42 7 -k 5"])
def explain(
    voice: Voice,
    folder: Folder,
    row: Annotated[str, typer.Argument(help="A row id.")],
    column: Annotated[str, typer.Argument(help="The column id that is predicted.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many ratings.", metavar="N")] = 10,
    output: Shown = None,
) -> None:
    """List the ratings of a row that moved one of its predictions most."""
    check_predictions(output, voice)
    model: Any = _load(folder)
    if not hasattr(model, "explain"):
        raise ValueError("explain is for models of ratings; this one is of observed pairs")
    found = model.explain(row, column, k)
    _show(voice, found, output, "Explanation")


@command(app, examples=["fisherfold complete update model/ new.csv"])
def update(
    voice: Voice,
    folder: Folder,
    file: File,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for the model, if not that of the old one."),
    ] = None,
    time_column: Annotated[str | None, typer.Option(help=_TIMES, metavar="NAME")] = None,
    weight_column: Annotated[str | None, typer.Option(help=_WEIGHTS, metavar="NAME")] = None,
    key_column: Annotated[str | None, typer.Option(help=_KEYS, metavar="NAME")] = None,
    row_features: Annotated[Path | None, typer.Option(help="Features of new rows.")] = None,
    column_features: Annotated[Path | None, typer.Option(help="The same for columns.")] = None,
    reading: Columns,
    skip_bad_lines: SkipBadLines = False,
) -> None:
    """Add new ratings, rows and columns to a model."""
    from fisherfold.completion.files import KIND

    place = output or folder
    check_output(place, KIND)
    model = _load(folder)
    columns = {"time": time_column, "weight": weight_column, "key": key_column}
    table = _more(file, reading, model, skip_bad_lines, **columns)
    features = [
        None if path is None else _features(path, name, side, reading, skip_bad_lines)
        for path, name, side in zip(
            (row_features, column_features), model.names_[:2], ("row", "column"), strict=True
        )
    ]
    with track("updating"):
        if model.model_.inference == "implicit":
            model.partial_fit(_entries(table))
        else:
            model.update_entries(_entries(table), *features)
    write_or_rescue(model.save, place)
    voice.result(
        f"Updated {place.name}",
        {"file": str(file), **_account(table), **_size(model), "model": str(place)},
    )


@command(
    app,
    examples=[
        "fisherfold complete evaluate ratings.csv --rank 10 --folds 5",
        "fisherfold complete evaluate ratings.csv --split time --time-column timestamp --top 10",
        "fisherfold complete evaluate train.csv --test test.csv --likelihood ordered --column-features films.csv",
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
        int, typer.Option("--folds", "-k", min=2, help="The number of random folds.", metavar="N")
    ] = 5,
    test: Annotated[
        Path | None, typer.Option(help="Ratings to predict, in place of folds.")
    ] = None,
    split: Annotated[
        Literal["folds", "time", "last", "random"],
        typer.Option(
            help="folds, or one split: time (the latest tenth), last (the last rating of each row), random.",
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
    """Held-out errors: over random folds with standard errors, on a later part, on a test file, or of a saved model."""
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
        fitted = _load(saved)
        table = _more(file, reading, fitted, skip_bad_lines, time=model.time_column)
        errors = "" if fitted.model_.inference == "implicit" else errors
        found = (
            {"file": str(file)} | _account(table) | _scores(fitted, _entries(table), top, relevant)
        )
        answer(f"Errors on {file.name}", found)
        return
    errors, fitted = "" if model.implicit else errors, model.estimator()
    table, entries, known = model.read(file, reading, skip_bad_lines)
    found = {"file": str(file)} | _account(table)
    if test is not None:
        fitted.fit_entries(entries, known)
        more = _more(test, reading, fitted, skip_bad_lines, time=model.time_column)
        found |= {"test": str(test), "rank": fitted.model_.posterior.rank}
        answer(
            f"Errors on {test.name}",
            found | _scores(fitted, _entries(more), top, relevant),
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


def _load(folder: Path) -> CompletionBase:
    from fisherfold.completion.base import CompletionBase

    return CompletionBase.load(folder)


def _read(file: Path, reading: Columns, skip_bad_lines: bool, **other: Any) -> RatingTable:
    from fisherfold.tables.readers import read_ratings

    how = reading.format() | {"decimal": reading.decimal, "skip_bad_lines": skip_bad_lines}
    with track(f"reading {file.name}"):
        return read_ratings(file, **how | other)


def _more(
    file: Path,
    reading: Columns,
    model: CompletionBase,
    skip_bad_lines: bool = False,
    **other: Any,
) -> RatingTable:
    """A table for a fitted model, whose names of columns come first."""
    implicit = model.model_.inference == "implicit"
    known = model.names_[:2] if implicit and model.names_[2] == "weight" else model.names_
    return _read(file, reading, skip_bad_lines, known=known, implicit=implicit, **other)


def _candidates(file: Path, reading: Columns, name: str) -> npt.NDArray[Any]:
    """The ids in the column of a table that has the name of the column ids, or in its first."""
    from fisherfold.tables.readers import ids, read_table

    how = {key: value for key, value in reading.format().items() if key != "columns"}
    table = read_table(file, **how)
    return ids(
        table.frame[name if name in table.frame.columns else table.frame.columns[0]], table.path
    )


def _features(file: Path, name: str, side: str, reading: Columns, skip_bad_lines: bool) -> Any:
    """A table of features, whose separator may be another than that of the ratings."""
    from fisherfold.completion.inference.features import with_numbers
    from fisherfold.tables.readers import read_table

    how = {"encoding": reading.encoding, "max_bytes": reading.format()["max_bytes"]}
    return with_numbers(read_table(file, skip_bad_lines=skip_bad_lines, **how).frame, name, side)


def _described(
    model: CompletionBase, rows: Path | None, columns: Path | None, reading: Columns
) -> dict[str, Any]:
    """The features of ids that were not in the fit."""
    return {
        f"{side}_features": _features(file, name, side, reading, False)
        for side, file, name in zip(("row", "column"), (rows, columns), model.names_, strict=False)
        if file is not None
    }


def _entries(table: RatingTable) -> Entries:
    from fisherfold.completion.entries import Entries

    names = ("row", "column") if table.header is None else (table.names[0], table.names[1])
    value = (
        "weight" if not table.has_values else "value" if table.header is None else table.names[2]
    )
    entries = Entries(table.rows, table.columns, table.values, (*names, value), "polars")
    return entries.with_extras(weights=table.weights, times=table.times, keys=table.keys)


def _account(table: RatingTable) -> dict[str, Any]:
    """What was read, and what of it was rejected."""
    return {
        **({"header": "none"} if table.header is None else {}),
        "lines": table.n_lines,
        "rejected": table.rejected,
        "columns read": ", ".join(table.names),
        **({"columns not read": ", ".join(table.others)} if table.others else {}),
    }


def _split(columns: str | None) -> tuple[str, ...] | None:
    return None if columns is None else tuple(part.strip() for part in columns.split(","))


def _size(model: CompletionBase) -> dict[str, int]:
    inside = model.model_
    sides = {
        f"rows ({model.names_[0]})": len(inside.row_ids),
        f"columns ({model.names_[1]})": len(inside.column_ids),
    }
    return sides | {"ratings": inside.posterior.n_ratings}


def _show(voice: Voice, found: Any, output: Path | None, title: str) -> None:
    """Print lists, or write them into a file."""
    import polars as pl

    from fisherfold.tables.writers import write_table

    frame = pl.DataFrame(found)
    if output is not None:
        write_table(frame, output)
        say_written(
            voice, title, {"lines": frame.height, "ids": frame.to_series(0).n_unique()}, output
        )
        return
    text = sum(not kind.is_float() for kind in frame.dtypes)
    voice.answer(
        {title.lower(): frame.to_dicts()}, grid(title, frame.columns, frame.iter_rows(), text=text)
    )
