"""``fisherfold complete``: fill tables with holes, and recommend, from the command line."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fisherfold.cli.common import command, group
from fisherfold.cli.options import (
    Checkpoint,
    Decimal,
    Encoding,
    Header,
    Output,
    Predictions,
    Separator,
    SkipBadLines,
    Timeout,
    UnpackLimit,
    check_output,
    check_predictions,
    in_bytes,
    one_of,
    write_or_rescue,
)  # fmt: skip
from fisherfold.cli.voice import Voice
from fisherfold.cli.words import named, typed
from fisherfold.plain import counted
from fisherfold.progress import track

if TYPE_CHECKING:
    from fisherfold.completion.entries import Entries
    from fisherfold.completion.estimator import MatrixCompletion
    from fisherfold.completion.fit import Extras
    from fisherfold.tables.readers import RatingTable

app = group(
    "Complete a table of ratings, readings or assays with holes, and recommend from it.",
    examples=["fisherfold complete fit ratings.csv --rank 10 -o model/", "fisherfold complete recommend model/ 42"],
)

_AUTO_RANKS = (2, 5, 10, 20)
_MEANING = (
    "fit error and coverage are those of the fitted ratings ('evaluate' tells held-out ones); noise is the standard "
    "deviation of an ordinary rating around its prediction, and 90 % intervals that are right cover 90 %"
)

File = Annotated[
    Path,
    typer.Argument(help="Ratings: CSV, TSV, '::' or Parquet with row id, column id and value; - reads standard input."),
]
Folder = Annotated[Path, typer.Argument(help="The folder of a fitted model.", callback=named("the model", "a folder"))]
Columns = Annotated[
    str | None, typer.Option("--columns", "-c", help="Columns by name or position, as in user,item,rating or 1,2,3.")
]
Rank = Annotated[str, typer.Option("--rank", "-r", help="The number of factors, or auto (chosen by cross-validation).")]
Seed = Annotated[int, typer.Option("--seed", "-s", help="Seed of everything random.")]
Inference = Annotated[
    str,
    typer.Option("--inference", help="variational or point.", autocompletion=one_of("variational", "point")),
]
Solver = Annotated[
    str,
    typer.Option(
        "--solver", help="Of --inference point: auto, or a solver of the paper's problem: rngd, rngd-vr, rcg, rgd.",
        autocompletion=one_of("auto", "rngd", "rngd-vr", "rcg", "rgd"),
    ),
]  # fmt: skip
RowFeatures = Annotated[
    Path | None,
    typer.Option("--row-features", help="A table with a column of row ids and, beside it, what is known of them."),
]
ColumnFeatures = Annotated[
    Path | None,
    typer.Option("--column-features", help="The same for column ids; fields of several are written as a|b."),
]
Likelihood = Annotated[
    str,
    typer.Option(
        "--likelihood", help="gaussian, ordered (values are steps of a scale) or binary (two values).",
        autocompletion=one_of("gaussian", "ordered", "binary"),
    ),
]  # fmt: skip
Offsets = Annotated[
    str,
    typer.Option(
        "--offsets", help="both, rows, columns, global or none.",
        autocompletion=one_of("both", "rows", "columns", "global", "none"),
    ),
]  # fmt: skip
Ridge = Annotated[
    float | None, typer.Option("--ridge", help="Prior strength in pseudo-ratings; learnt if not given.")
]
Duplicates = Annotated[
    str,
    typer.Option(
        "--duplicates", help="For pairs given twice: mean, last, sum or error.",
        autocompletion=one_of("mean", "last", "sum", "error"),
    ),
]  # fmt: skip
Threads = Annotated[int | None, typer.Option("--threads", help="Threads of the fit; torch decides if not given.")]
Implicit = Annotated[
    bool,
    typer.Option(
        "--implicit", help="Values are weights of observed pairs (clicks, plays); what is missing is no interest."
    ),
]  # fmt: skip
MaxIter = Annotated[int, typer.Option("--max-iter", help="The largest number of passes.")]
Shown = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="A file for the table: .csv, .csv.gz or .parquet; - prints CSV."),
]
K = Annotated[int, typer.Option("-k", min=1, help="How many for each id.")]


@command(
    app,
    examples=[
        "fisherfold complete fit ratings.csv --rank 10 --seed 0 -o model/",
        "fisherfold complete fit ratings.dat --separator :: --rank auto -o model/",
        "fisherfold complete fit plays.csv --implicit --rank 32 -o model/",
    ],
)
def fit(
    voice: Voice, file: File, output: Output,
    rank: Rank = "10", seed: Seed = 0, columns: Columns = None, separator: Separator = None, decimal: Decimal = ".",
    header: Header = None, encoding: Encoding = None, skip_bad_lines: SkipBadLines = False,
    unpack_limit: UnpackLimit = 4.0, inference: Inference = "variational", solver: Solver = "auto",
    offsets: Offsets = "both", ridge: Ridge = None, duplicates: Duplicates = "mean", max_iter: MaxIter = 50,
    threads: Threads = None, checkpoint: Checkpoint = None,
    timeout: Timeout = 300, implicit: Implicit = False, row_features: RowFeatures = None,
    column_features: ColumnFeatures = None, likelihood: Likelihood = "gaussian",
) -> None:  # fmt: skip
    """Fit a model to a file of ratings and write it into a folder; under torchrun its processes share the work."""
    from fisherfold.completion.files import KIND
    from fisherfold.distributed import joined, under_torchrun

    check_output(output, KIND)
    if implicit:
        _only_implicit(
            inference=inference, solver=solver, offsets=offsets, ridge=ridge, likelihood=likelihood,
            row_features=row_features, column_features=column_features,
        )  # fmt: skip
        model = _implicit(rank, duplicates, random_state=seed, max_iter=max_iter, n_jobs=threads, verbose=voice.verbose)
    else:
        model = _estimator(
            rank, random_state=seed, inference=inference, solver=solver, offsets=offsets, ridge=ridge,
            duplicates=duplicates, max_iter=max_iter, n_jobs=threads, verbose=voice.verbose, likelihood=likelihood,
        )  # fmt: skip
    if checkpoint is not None and not under_torchrun():
        raise ValueError("--checkpoint is for fits over several processes, under torchrun")
    if under_torchrun() and (row_features or column_features or likelihood != "gaussian"):
        raise ValueError("features and likelihoods other than gaussian need a fit in one process, without torchrun")
    began = time.perf_counter()
    with joined(timeout) as processes:
        reading = {
            "columns": _split(columns), "separator": separator, "decimal": decimal or ".", "header": header,
            "encoding": encoding, "skip_bad_lines": skip_bad_lines, "max_bytes": in_bytes(unpack_limit),
        }  # fmt: skip
        if under_torchrun():
            model.fit_file_share(file, checkpoint=checkpoint, **reading)
            table = None
        else:
            table = _read(file, **reading)
            began = time.perf_counter()
            entries = _entries(table)
            if row_features is None and column_features is None:
                model.fit_entries(entries)
            else:
                model.fit_entries(entries, _features(entries, (row_features, column_features)))
        seconds = time.perf_counter() - began
        with processes.together():
            if processes.is_first:
                write_or_rescue(model.save, output)
                if checkpoint is not None:
                    checkpoint.unlink(missing_ok=True)
    if not processes.is_first:
        return
    inside = model.model_
    found: dict[str, Any] = {"file": str(file)} | (_account(table) if table else {"processes": processes.size}) | {
        f"{model.names_[0]}s": len(inside.row_ids), f"{model.names_[1]}s": len(inside.column_ids),
        "ratings": inside.posterior.n_ratings, "merged": model.n_duplicates_, "rank": inside.posterior.rank,
        "passes": model.n_iter_, "converged": model.converged_,
        **({} if implicit else _fit_error(model) | {"noise": model.noise_}), "seconds": seconds, "model": str(output),
    }  # fmt: skip
    if hasattr(model, "cv_results_"):
        found["cv_rmse"] = dict(zip(map(str, model.cv_results_["rank"]), model.cv_results_["mean_rmse"], strict=True))
    voice.result(f"Completed {file.name}", found)
    if not implicit:
        voice.remark(_MEANING)
    voice.remark(f"next: fisherfold complete recommend {typed(output, inside.row_ids.labels[0])}")


@command(
    app,
    examples=[
        "fisherfold complete predict model/ pairs.csv -o predictions.csv",
        "fisherfold complete predict model/ - --std -o -",
    ],
)
def predict(
    voice: Voice,
    folder: Folder,
    pairs: Annotated[
        Path,
        typer.Argument(help="A table whose first two columns are row id and column id; - reads standard input."),
    ],
    output: Predictions = Path("-"),
    columns: Columns = None, separator: Separator = None, decimal: Decimal = ".", header: Header = None,
    encoding: Encoding = None, unpack_limit: UnpackLimit = 4.0,
    std: Annotated[bool, typer.Option("--std", help="Add the predictive standard deviation, column std.")] = False,
    name: Annotated[str, typer.Option("--name", help="The name of the column of predictions.")] = "prediction",
) -> None:  # fmt: skip
    """Predict pairs: the table is written with a last column `prediction`."""
    import numpy as np

    from fisherfold.tables.readers import read_pairs
    from fisherfold.tables.writers import add_columns, write_table

    check_predictions(output, voice)
    model = _load(folder)
    named_columns = _split(columns)
    given = read_pairs(
        pairs, columns=named_columns, separator=separator, header=header, encoding=encoding,
        max_bytes=in_bytes(unpack_limit),
    )  # fmt: skip
    known = list(model.names_[:2])
    if columns is None and given.names != known and {*known} <= {*given.table.frame.columns}:
        given = _by_name(given, known)
    frame = given.table.frame
    add_columns(frame.head(0), {each: [] for each in [name, *(["std"] if std else [])]}, given.table.path)
    inside = model.model_
    if std and inside.inference == "point":
        raise ValueError("--std needs a model of --inference variational: a point estimate has no error bars")
    i, j = inside.locate(given.rows, "row", model.unseen), inside.locate(given.columns, "column", model.unseen)
    with track(f"predicting {counted(len(frame), 'pair', form=',')}"):
        mean, spread = inside.predict(i, j, with_std=std, clip=model.clip, unseen=model.unseen)
    extra = {} if spread is None else {"std": spread}
    write_table(add_columns(frame, extra | {name: mean}, given.table.path), output, decimal or ".")
    unknown = int(np.count_nonzero((i < 0) | (j < 0)))
    _say(voice, "Predicted", {"pairs": len(mean), "with ids not seen in the fit": unknown}, output)


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
    k: K = 10,
    everyone: Annotated[bool, typer.Option("--all", help="For all rows of the model.")] = False,
    rated: Annotated[
        Path | None, typer.Option("--rated", help="For new rows: a table of their row ids, column ids and values.")
    ] = None,
    candidates: Annotated[
        Path | None, typer.Option("--candidates", help="A table whose first column has the ids to choose from.")
    ] = None,
    by: Annotated[
        str,
        typer.Option("--by", help="mean, upper or sample.", autocompletion=one_of("mean", "upper", "sample")),
    ] = "mean",
    include_seen: Annotated[bool, typer.Option("--include-seen", help="Also columns that the row has rated.")] = False,
    output: Shown = None,
) -> None:  # fmt: skip
    """List the columns with the largest predictions for some rows, for all, or for new ones."""
    from fisherfold.tables.readers import read_ratings, read_table

    if (ids is None or not ids) + (not everyone) + (rated is None) != 2:
        raise ValueError("give row ids, or --all, or --rated FILE: one of the three")
    if output is not None:
        check_predictions(output, voice)
    model = _load(folder)
    options: dict[str, Any] = {"exclude_seen": not include_seen, "by": by}
    if candidates is not None:
        options["candidates"] = read_table(candidates).frame.to_series(0).to_numpy()
    with track("recommending"):
        if rated is not None:
            found = model.recommend_new(_entries(read_ratings(rated)), k, **options)
        else:
            found = model.recommend(None if everyone else ids, k, **options)
    unknown = [] if everyone or rated is not None else [t for t in ids or () if model.model_.row_ids.encode([t])[0] < 0]
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
    if output is not None:
        check_predictions(output, voice)
    found = _load(folder).similar(ids, k, of="rows" if rows else "columns")
    _show(voice, found, output, "Similar")


@command(app, examples=["fisherfold complete update model/ new.csv"])
def update(
    voice: Voice, folder: Folder, file: File,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder for the model, if not that of the old one.")
    ] = None,
    columns: Columns = None, separator: Separator = None, decimal: Decimal = ".", header: Header = None,
    encoding: Encoding = None, skip_bad_lines: SkipBadLines = False,
) -> None:  # fmt: skip
    """Add new ratings, rows and columns to a model."""
    from fisherfold.completion.files import KIND

    place = output or folder
    check_output(place, KIND)
    model = _load(folder)
    table = _read(
        file, columns=_split(columns), separator=separator, decimal=decimal or ".", header=header, encoding=encoding,
        skip_bad_lines=skip_bad_lines,
    )  # fmt: skip
    with track("updating"):
        model.partial_fit(_entries(table))
    write_or_rescue(model.save, place)
    inside = model.model_
    found = {"file": str(file)} | _account(table) | {
        f"{model.names_[0]}s": len(inside.row_ids), f"{model.names_[1]}s": len(inside.column_ids),
        "ratings": inside.posterior.n_ratings, "model": str(place),
    }  # fmt: skip
    voice.result(f"Updated {place.name}", found)


@command(
    app,
    examples=[
        "fisherfold complete evaluate ratings.csv --rank 10 --folds 5",
        "fisherfold complete evaluate ratings.csv --split time --columns user,item,rating,timestamp --top 10",
        "fisherfold complete evaluate train.csv --test test.csv",
        "fisherfold complete evaluate test.csv --model model/",
    ],
)
def evaluate(
    voice: Voice, file: File, rank: Rank = "10", seed: Seed = 0,
    folds: Annotated[int, typer.Option("--folds", "-k", min=2, help="The number of random folds.")] = 5,
    test: Annotated[Path | None, typer.Option("--test", help="Ratings to predict, in place of folds.")] = None,
    split: Annotated[
        str,
        typer.Option(
            "--split", help="folds, or one split: time (the latest tenth), last (the last rating of each row), random.",
            autocompletion=one_of("folds", "time", "last", "random"),
        ),
    ] = "folds",
    time_column: Annotated[str | None, typer.Option("--time-column", help="The column with times.")] = None,
    saved: Annotated[Path | None, typer.Option("--model", help="A fitted model to evaluate on the file.")] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Also metrics of lists of this length.")] = None,
    relevant: Annotated[
        float | None, typer.Option("--relevant", help="For --top: the least rating that counts; the mean if not given.")
    ] = None,
    columns: Columns = None, separator: Separator = None, decimal: Decimal = ".", header: Header = None,
    encoding: Encoding = None, skip_bad_lines: SkipBadLines = False, unpack_limit: UnpackLimit = 4.0,
    inference: Inference = "variational", solver: Solver = "auto", offsets: Offsets = "both", ridge: Ridge = None,
    duplicates: Duplicates = "mean", max_iter: MaxIter = 50, threads: Threads = None,
) -> None:  # fmt: skip
    """Held-out errors: over random folds with standard errors, on a later part, on a test file, or of a saved model."""
    import numpy as np

    if split not in ("folds", "time", "last", "random"):
        raise ValueError(f"--split must be one of folds, time, last, random, got {split!r}")
    if split in ("time", "last") and time_column is None:
        raise ValueError(f"--split {split} needs --time-column")
    names = _split(columns)
    if time_column is not None:
        names = (*(names or _first_three(file, separator, header, encoding)), time_column)
    reading = {
        "separator": separator, "decimal": decimal or ".", "header": header, "encoding": encoding,
        "skip_bad_lines": skip_bad_lines, "max_bytes": in_bytes(unpack_limit),
    }  # fmt: skip
    table = _read(file, columns=names, **reading)
    found: dict[str, Any] = {"file": str(file)} | _account(table)
    entries = _entries(table)
    if saved is not None:
        model = _load(saved)
        found |= _scores(model, entries, top, relevant)
        voice.result(f"Errors on {file.name}", found)
        return
    model = _estimator(
        rank, random_state=seed, inference=inference, solver=solver, offsets=offsets, ridge=ridge,
        duplicates=duplicates, max_iter=max_iter, n_jobs=threads,
    )  # fmt: skip
    if test is not None:
        model.fit_entries(entries)
        found |= {"test": str(test), "rank": model.model_.posterior.rank}
        found |= _scores(model, _entries(_read(test, columns=_split(columns), **reading)), top, relevant)
        voice.result(f"Errors on {test.name}", found)
        return
    if split == "folds" or split == "random":
        merged = entries.merged(duplicates)  # no pair is both held out and in the fit
        found["merged"] = len(entries.values) - len(merged.values)
        entries = merged
    parts = _parts(split, folds, entries, table, seed)
    scores = []
    with track("evaluating", len(parts)) as line:
        for train, held in parts:
            model.fit_entries(entries.at(train))
            scores.append({"rank": model.model_.posterior.rank} | _scores(model, entries.at(held), top, relevant))
            line.advance()
    found |= {"held out": len(parts[0][1])} if len(parts) == 1 else {"folds": folds}
    for name in scores[0]:
        values = [score[name] for score in scores]
        if len(parts) == 1 or name == "rank":
            found[name] = values[0] if len(set(values)) == 1 else values
        else:
            error = float(np.std(values, ddof=1) / np.sqrt(folds))
            found[name] = {"mean": float(np.mean(values)), "standard error": error}
    voice.result(f"Held-out errors on {file.name}", found)


def _parts(split: str, folds: int, entries: Entries, table: RatingTable, seed: int) -> list[Any]:
    """Positions of the training and of the held-out entries."""
    import numpy as np

    from fisherfold.completion import splits

    if split == "random":
        return [splits.random_split(len(entries.values), seed=seed)]
    if split == "time":
        return [splits.time_split(table.times)]
    if split == "last":
        return [splits.last_out_split(entries.rows, table.times)]
    if folds > len(entries.values):
        raise ValueError(f"--folds must be at most the number of ratings, {len(entries.values)}, got {folds}")
    fold = np.random.default_rng(seed).permutation(len(entries.values)) % folds
    return [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(folds)]


def _scores(model: MatrixCompletion, held: Entries, top: int | None, relevant: float | None) -> dict[str, float]:
    """Errors of predictions, what the 90 % intervals cover, and metrics of ranked lists."""
    import numpy as np

    from fisherfold.completion import metrics

    inside = model.model_
    i, j = inside.locate(held.rows, "row", "prior"), inside.locate(held.columns, "column", "prior")
    mean, std = inside.predict(i, j, with_std=inside.inference == "variational", clip=model.clip)
    found = {"rmse": metrics.rmse(held.values, mean), "mae": metrics.mae(held.values, mean)}
    if std is not None:
        found["covered by 90 % intervals"] = metrics.interval_coverage(held.values, mean, std)
    if top is not None:
        good = np.flatnonzero(held.values >= relevant if relevant is not None else held.values > model.offset_)
        wanted = held.at(good)
        lists = model.recommend(np.unique(wanted.rows), top)
        known = metrics.ranking_metrics(lists, (wanted.rows, wanted.columns), top)
        found |= {f"{name}@{top}": value for name, value in known.items()}
    return found


def _fit_error(model: MatrixCompletion) -> dict[str, float]:
    """Errors of the fitted ratings themselves, where the model keeps them."""
    from fisherfold.completion import metrics

    inside = model.model_
    if inside.seen is None:
        return {}
    i, j, values = inside.given()
    mean, std = inside.predict(i, j, with_std=inside.inference == "variational", clip=model.clip)
    found = {"fit error (RMSE)": metrics.rmse(values, mean)}
    return found if std is None else found | {"covered by 90 % intervals": metrics.interval_coverage(values, mean, std)}


def _estimator(rank: str, **options: Any) -> MatrixCompletion:
    """The estimator for ``--rank``."""
    from fisherfold.completion.cross_validation import MatrixCompletionCV
    from fisherfold.completion.estimator import MatrixCompletion

    if rank == "auto":
        ridge = options.pop("ridge")
        return MatrixCompletionCV(_AUTO_RANKS, ridges=(ridge,), **options)
    if not rank.isdecimal():
        raise ValueError(f"--rank must be a whole number of at least 1 or auto, got {rank!r}")
    return MatrixCompletion(int(rank), **options)


def _load(folder: Path) -> MatrixCompletion:
    from fisherfold.completion.estimator import MatrixCompletion

    return MatrixCompletion.load(folder)


def _only_implicit(**given: Any) -> None:
    """Reject options of ratings."""
    usual = {
        "inference": "variational", "solver": "auto", "offsets": "both", "ridge": None, "likelihood": "gaussian",
        "row_features": None, "column_features": None,
    }  # fmt: skip
    if wrong := [name for name, value in given.items() if value != usual[name]]:
        raise ValueError(f"--{wrong[0].replace('_', '-')} is for ratings and has no meaning with --implicit")


def _implicit(rank: str, duplicates: str, **options: Any) -> MatrixCompletion:
    from fisherfold.completion.implicit import ImplicitCompletion

    if not rank.isdigit():
        raise ValueError(f"--rank must be a whole number with --implicit, got {rank!r}")
    # weights of pairs that occur twice are added, unless told otherwise
    return ImplicitCompletion(int(rank), duplicates="sum" if duplicates == "mean" else duplicates, **options)


def _read(file: Path, **reading: Any) -> RatingTable:
    from fisherfold.tables.readers import read_ratings

    with track(f"reading {file.name}"):
        return read_ratings(file, **reading)


def _entries(table: RatingTable) -> Entries:
    from fisherfold.completion.entries import Entries

    default = ("row", "column", "value")
    names = default if table.header is None else (table.names[0], table.names[1], table.names[2])
    return Entries(table.rows, table.columns, table.values, names, "polars")


def _features(entries: Entries, files: tuple[Path | None, Path | None]) -> Extras:
    """The features in some files, encoded."""
    from fisherfold.completion.fit import Extras
    from fisherfold.completion.inference.features import encode_features, with_numbers
    from fisherfold.tables.readers import read_table

    found = [
        None if file is None else encode_features(with_numbers(read_table(file).frame, name), side, name)
        for file, side, name in zip(files, ("row", "column"), entries.names[:2], strict=True)
    ]
    return Extras((found[0], found[1]))


def _first_three(file: Path, separator: str | None, header: bool | None, encoding: str | None) -> list[str]:
    from fisherfold.tables.readers import choose, read_table

    if str(file) == "-":
        raise ValueError("--time-column of standard input needs --columns as well")
    table = read_table(file, separator=separator, header=header, encoding=encoding)
    return choose(table, None, ("row id", "column id", "value"), least=3)


def _by_name(given: Any, names: list[str]) -> Any:
    """The pairs of a table by the names that their columns had in the fit."""
    from dataclasses import replace

    from fisherfold.tables.readers import ids

    rows, columns = (ids(given.table.frame[name], given.table.path) for name in names)
    return replace(given, rows=rows, columns=columns, names=names)


def _account(table: RatingTable) -> dict[str, Any]:
    """What was read, and what of it was rejected."""
    return {
        "header": "none" if table.header is None else ", ".join(table.header), "lines": table.n_lines,
        "rejected": table.rejected, "columns read": ", ".join(table.names),
        **({"columns not read": ", ".join(table.others)} if table.others else {}),
    }  # fmt: skip


def _split(columns: str | None) -> tuple[str, ...] | None:
    return None if columns is None else tuple(part.strip() for part in columns.split(","))


def _say(voice: Voice, title: str, facts: dict[str, Any], output: Path) -> None:
    """Say what was written; on standard error where the table itself is on the output."""
    if str(output) == "-":
        voice.remark(f"{title.lower()}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    else:
        voice.result(title, facts | {"written": str(output)})


def _show(voice: Voice, found: Any, output: Path | None, title: str) -> None:
    """Print lists, or write them into a file."""
    import polars as pl
    from rich.markup import escape
    from rich.table import Table

    from fisherfold.cli.words import cell, printable
    from fisherfold.tables.writers import write_table

    frame = found if isinstance(found, pl.DataFrame) else pl.from_pandas(found)
    if output is not None:
        write_table(frame, output)
        _say(voice, title, {"lines": frame.height, "ids": frame.to_series(0).n_unique()}, output)
        return
    table = Table(title=title)
    for name in frame.columns:
        table.add_column(escape(printable(name)), justify="right" if frame[name].dtype.is_float() else "left")
    for line in frame.iter_rows():
        table.add_row(*(escape(printable(cell(value))) for value in line))
    voice.answer({title.lower(): frame.to_dicts()}, table)
