"""``fisherfold complete``: fill tables with holes from the command line.

Files are written under a temporary name and renamed, so that none is ever half there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fisherfold.cli.common import command, group
from fisherfold.cli.given_ids import check_spelling, holds_ids, row_id
from fisherfold.cli.options import Checkpoint, Decimal, Encoding, UnpackLimit, in_bytes, one_of
from fisherfold.cli.outputs import Output, Predictions, check_output, check_predictions, say_written, write_or_rescue
from fisherfold.cli.voice import Voice
from fisherfold.cli.words import named, printable, typed
from fisherfold.plain import counted

if TYPE_CHECKING:
    from fisherfold.completion.estimator import MatrixCompletion
    from fisherfold.tables.inputs import Observations
    from fisherfold.tables.tables import RatingTable

app = group(
    "Complete a table of ratings, readings or assays with holes.",
    examples=["fisherfold complete fit ratings.csv --rank 10 -o model/", "fisherfold complete recommend model/ 42"],
)

_AUTO_RANKS = (2, 5, 10, 20)

File = Annotated[
    Path,
    typer.Argument(help="Ratings: CSV, TSV, '::' or Parquet with row id, column id and value; - reads standard input."),
]
Folder = Annotated[Path, typer.Argument(help="The folder of a fitted model.", callback=named("the model", "a folder"))]
Columns = Annotated[
    str | None, typer.Option("--columns", "-c", help="Columns by name or position, as in user,item,rating or 1,2,3.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", help="csv, tsv, :: or parquet; detected if not given.",
        autocompletion=one_of("csv", "tsv", "::", "parquet"),
    ),
]  # fmt: skip
Header = Annotated[
    bool | None,
    typer.Option("--header/--no-header", help="Whether the first line names the columns.", show_default="auto"),
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
        "--solver",
        help="Of --inference point: auto (a ridge on both factors, chosen on held-out ratings), or a solver of the "
        "paper's problem: rngd, rngd-vr, rcg, rgd.",
        autocompletion=one_of("auto", "rngd", "rngd-vr", "rcg", "rgd"),
    ),
]
Offsets = Annotated[
    str,
    typer.Option(
        "--offsets", help="both, rows, columns, global or none.",
        autocompletion=one_of("both", "rows", "columns", "global", "none"),
    ),
]  # fmt: skip
Ridge = Annotated[float | None, typer.Option("--ridge", help="The ridge, in imaginary ratings; learnt if not given.")]
Duplicates = Annotated[
    str,
    typer.Option(
        "--duplicates", help="For pairs given twice: mean, last, sum or error.",
        autocompletion=one_of("mean", "last", "sum", "error"),
    ),
]  # fmt: skip
Threads = Annotated[int | None, typer.Option("--threads", help="Threads of the fit; torch decides if not given.")]
MaxIter = Annotated[int, typer.Option("--max-iter", help="The largest number of passes.")]


@command(
    app,
    examples=[
        "fisherfold complete fit ratings.csv --rank 10 --seed 0 -o model/",
        "fisherfold complete fit ratings.dat --format :: --rank auto -o model/",
    ],
)
def fit(
    voice: Voice, file: File, output: Output,
    rank: Rank = "10", seed: Seed = 0, columns: Columns = None, file_format: Format = None, header: Header = None,
    encoding: Encoding = None, decimal: Decimal = None, unpack_limit: UnpackLimit = 4.0,
    inference: Inference = "variational", solver: Solver = "auto", offsets: Offsets = "both", ridge: Ridge = None,
    duplicates: Duplicates = "mean", max_iter: MaxIter = 50, threads: Threads = None,
    keep_on_interrupt: Annotated[
        bool, typer.Option("--keep-on-interrupt", help="At Ctrl-C write the model of the passes done so far.")
    ] = False,
    checkpoint: Checkpoint = None,
) -> None:  # fmt: skip
    """Fit a model to a file of ratings and write it into a folder; under torchrun its processes share the work."""
    import numpy as np

    from fisherfold.completion.io import KIND
    from fisherfold.distributed import joined, under_torchrun
    from fisherfold.tables.table_sources import spoken
    from fisherfold.tables.tables import read_ratings

    check_output(output, KIND)
    kept = "; with --keep-on-interrupt the passes done so far are kept"
    voice.resume = "no model was written" + (": there was none of all ratings yet" if keep_on_interrupt else kept)
    model = _estimator(
        rank, random_state=seed, inference=inference, solver=solver, offsets=offsets, ridge=ridge,
        duplicates=duplicates, max_iter=max_iter, n_jobs=threads, verbose=voice.shows_progress or voice.verbose,
        on_interrupt="return" if keep_on_interrupt else "raise", checkpoint=checkpoint,
    )  # fmt: skip
    resumed = checkpoint is not None and (checkpoint.exists() or Path(f"{checkpoint}.search").exists())
    if checkpoint is not None:
        voice.resume = f"no model was written; the same command goes on from {checkpoint}"
    began = time.perf_counter()
    with joined() as processes:
        if under_torchrun():
            if encoding is not None:
                raise ValueError("--encoding needs one process: parts of a file are read as UTF-8, convert it first")
            model.fit_file_share(
                file, columns=_split(columns), file_format=file_format, header=header, decimal=decimal
            )
            n_read, refused, names, mark = model.n_read_, model.refused_, model.header_, model.decimal_
            taken, others = model.columns_read_, model.columns_unexplained_
        else:
            table = read_ratings(
                file, columns=_split(columns), file_format=file_format, header=header, encoding=encoding,
                decimal=decimal, max_bytes=in_bytes(unpack_limit),
            )  # fmt: skip
            voice.detail(f"read {counted(table.n_read, 'line', form=',')} of {spoken(file)}")
            n_read, refused, names, mark = table.n_read, table.refused, table.header, table.decimal
            taken, others = table.names, table.unexplained
            began = time.perf_counter()
            model.fit_observations(_observed(table))
            if names is not None:
                model.feature_names_in_ = np.array(table.names[:2], dtype=object)
        seconds = time.perf_counter() - began
        with processes.together():
            if processes.is_first:
                write_or_rescue(model.save, output)
    if not processes.is_first:
        return
    inside = model.model_
    found: dict[str, Any] = {
        "file": str(spoken(file)), **_read(names, n_read, refused), "columns read": ", ".join(taken),
        "decimal mark": mark, "rows": len(inside.row_ids), "columns": len(inside.column_ids),
        "ratings": inside.posterior.n_ratings, "merged": model.n_duplicates_, "rank": inside.posterior.rank,
        "passes": model.n_iter_, "converged": model.converged_, "interrupted": model.interrupted_,
        "noise": model.noise_, "seconds": seconds, "model": str(output),
    }  # fmt: skip
    if under_torchrun():
        found["processes"] = processes.size
    if checkpoint is not None:
        found["went on from a checkpoint"] = resumed
    if hasattr(model, "cv_results_"):
        found["cv_rmse"] = dict(zip(map(str, model.cv_results_["rank"]), model.cv_results_["mean_rmse"], strict=True))
    voice.result(f"Completed {spoken(file).name}", found)
    if columns is None:
        _say_columns(voice, taken, others)
    voice.remark(f"next: fisherfold complete recommend {typed(output, inside.row_ids.labels[0])}")


@command(
    app,
    examples=[
        "fisherfold complete predict model/ pairs.csv -o predictions.csv",
        "fisherfold complete predict model/ - -o -",
    ],
)
def predict(
    voice: Voice,
    folder: Folder,
    pairs: Annotated[
        Path,
        typer.Argument(help="A table whose first two columns are row id and column id; - reads standard input."),
    ],
    output: Predictions,
    columns: Columns = None, file_format: Format = None, header: Header = None,
    encoding: Encoding = None, unpack_limit: UnpackLimit = 4.0,
    decimal: Annotated[
        str, typer.Option("--decimal", help="The decimal mark of the predictions, . or ,.", metavar="MARK")
    ] = ".",
    std: Annotated[bool, typer.Option("--std", help="Add the predictive standard deviation, column std.")] = False,
) -> None:  # fmt: skip
    """Predict pairs: the table is written with a last column `prediction`."""
    import numpy as np

    from fisherfold.completion.estimator import MatrixCompletion
    from fisherfold.tables.decimals import check_mark
    from fisherfold.tables.table_columns import in_order
    from fisherfold.tables.table_output import write_predictions
    from fisherfold.tables.table_sources import spoken
    from fisherfold.tables.tables import read_pairs

    check_mark(decimal)
    check_predictions(output, voice)
    model = MatrixCompletion.load(folder)
    text = model.model_.row_ids.kind == "objects", model.model_.column_ids.kind == "objects"
    table, rows, ids = read_pairs(
        pairs, text=text, columns=_split(columns), file_format=file_format, header=header, encoding=encoding,
        max_bytes=in_bytes(unpack_limit), is_data=lambda fields: holds_ids(model, fields, _split(columns)),
    )  # fmt: skip
    known, names = list(getattr(model, "feature_names_in_", ())), in_order(table.header or [], table.index, 2)
    if columns is None and known and names[:2] != known and {*known} <= {*names}:
        raise ValueError(
            f"{spoken(pairs)}: the first columns are {', '.join(names[:2])}, those of the fit were {', '.join(known)}; "
            f"put these first, or name them with --columns {','.join(known)}"
        )
    frame, inside = table.frame, model.model_
    rows, ids = inside.row_ids.meant(rows), inside.column_ids.meant(ids)
    for name, index, given in (("row", inside.row_ids, rows), ("column", inside.column_ids, ids)):
        check_spelling(index, given, name, voice, f"{spoken(pairs)}: ")
    i, j = inside.locate(rows, ids, model.unseen)
    if std and inside.inference == "point":
        raise ValueError("--std needs a model of --inference variational: a point estimate has no error bars")
    with voice.progress(f"predicting {counted(len(frame), 'pair', form=',')}"):
        mean, spread = inside.predict(i, j, with_std=std, clip=model.clip, unseen=model.unseen)
    frame = frame.drop([name for name in ("prediction", *(["std"] if std else [])) if name in frame.columns])
    added = {"prediction": mean} if spread is None else {"std": spread, "prediction": mean}
    write_predictions(frame, added, spoken(pairs), output, decimal)
    unknown = int(np.count_nonzero(((i < 0) | (j < 0)).cpu().numpy()))
    found = {
        **_read(table.header, len(mean) + sum(table.refused.values()), table.refused), "pairs": len(mean),
        "with ids not seen in the fit": unknown,
    }  # fmt: skip
    say_written(voice, found, output, "written")


@command(app, examples=["fisherfold complete recommend model/ 42 -k 5"])
def recommend(
    voice: Voice,
    folder: Folder,
    row: Annotated[list[str], typer.Argument(help="One or more row ids.")],
    k: Annotated[int, typer.Option("-k", min=1, help="How many columns for each row.")] = 10,
    include_seen: Annotated[bool, typer.Option("--include-seen", help="Also columns that the row has rated.")] = False,
) -> None:
    """List the columns with the largest predictions for some rows."""
    from fisherfold.completion.estimator import MatrixCompletion
    from fisherfold.tables.ids import plain

    model = MatrixCompletion.load(folder)
    lists = {}
    for text in row:
        given = row_id(model, text, voice)
        if model.model_.row_ids.numbers([given])[0] < 0:
            voice.remark(f"row {text} was not in the fit: these are the columns that do best on average")
        ids, scores = model.recommend(given, k, exclude_seen=not include_seen)
        lists[text] = [{"column": plain(c), "prediction": float(s)} for c, s in zip(ids, scores, strict=True)]
    table = Table(title="Recommendations")
    for name in ("row", "place", "column", "prediction"):
        table.add_column(name, justify="right" if name in ("place", "prediction") else "left")
    largest = max((abs(item["prediction"]) for items in lists.values() for item in items), default=0.0)
    form = ".3f" if largest == 0 or 1e-2 <= largest < 1e6 else ".3e"
    for text, items in lists.items():
        for place, item in enumerate(items, start=1):
            name, column = (escape(printable(each)) for each in (text if place == 1 else "", str(item["column"])))
            table.add_row(name, str(place), column, f"{item['prediction']:{form}}")
    voice.answer(lists, table)


@command(app, examples=["fisherfold complete evaluate ratings.csv --rank 10 --folds 5"])
def evaluate(
    voice: Voice, file: File, rank: Rank = "10", seed: Seed = 0,
    folds: Annotated[int, typer.Option("--folds", "-k", min=2, help="The number of folds.")] = 5,
    columns: Columns = None, file_format: Format = None, header: Header = None, encoding: Encoding = None,
    decimal: Decimal = None, unpack_limit: UnpackLimit = 4.0, inference: Inference = "variational",
    solver: Solver = "auto", offsets: Offsets = "both", ridge: Ridge = None, duplicates: Duplicates = "mean",
    max_iter: MaxIter = 50, threads: Threads = None,
) -> None:  # fmt: skip
    """Cross-validate: held-out errors with their standard errors over random folds."""
    import numpy as np
    from sklearn.model_selection import KFold

    from fisherfold.completion.fit import merged
    from fisherfold.tables.table_sources import spoken
    from fisherfold.tables.tables import read_ratings

    table = read_ratings(
        file, columns=_split(columns), file_format=file_format, header=header, encoding=encoding, decimal=decimal,
        max_bytes=in_bytes(unpack_limit),
    )  # fmt: skip
    pairs = merged(_observed(table), duplicates)
    if folds > len(pairs.values):
        raise ValueError(f"--folds must be at most the number of ratings, {len(pairs.values)}, got {folds}")
    model = _estimator(
        rank, random_state=seed, inference=inference, solver=solver, offsets=offsets, ridge=ridge,
        duplicates=duplicates, max_iter=max_iter, n_jobs=threads,
    )  # fmt: skip
    parts = list(KFold(folds, shuffle=True, random_state=seed).split(pairs.values))
    scores, ranks = [], []
    with voice.progress("evaluating", folds) as bar:
        for number, (train, test) in enumerate(parts, start=1):
            bar.say(f"fold {number} of {folds}")
            score, used = _score(model, pairs, train, test)
            scores.append(score)
            ranks.append(used)
            bar.advance()
    found: dict[str, Any] = {
        "file": str(spoken(file)), **_read(table.header, table.n_read, table.refused),
        "columns read": ", ".join(table.names), "decimal mark": table.decimal,
        "merged": len(table.values) - len(pairs.values), "folds": folds,
        "rank": ranks if rank == "auto" else ranks[0],
    }  # fmt: skip
    for name in scores[0]:
        values = np.array([score[name] for score in scores])
        found[name] = {"mean": float(values.mean()), "standard error": float(values.std(ddof=1) / np.sqrt(folds))}
    voice.result(f"Held-out errors on {spoken(file).name}", found)
    if columns is None:
        _say_columns(voice, table.names, table.unexplained)


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


def _observed(table: RatingTable) -> Observations:
    from fisherfold.tables.inputs import Observations

    return Observations(table.rows, table.columns, table.values, table.rows, table.columns)


def _score(model: MatrixCompletion, pairs: Observations, train: Any, test: Any) -> tuple[dict[str, float], int]:
    """Errors on one fold, and what the 90 % intervals cover; and the rank that it was fitted with."""
    import numpy as np
    from sklearn.base import clone

    fold: MatrixCompletion = clone(model)
    rows, columns = pairs.rows[train], pairs.columns[train]
    fold.fit_observations(type(pairs)(rows, columns, pairs.values[train], rows, columns))
    inside, values = fold.model_, pairs.values[test]
    with_std = inside.inference == "variational"
    i, j = inside.locate(pairs.rows[test], pairs.columns[test], "prior")
    mean, std = inside.predict(i, j, with_std=with_std, clip=fold.clip)
    error = mean - values
    scores = {"rmse": float(np.sqrt(np.mean(error**2))), "mae": float(np.mean(np.abs(error)))}
    if std is not None:
        scores["covered by 90 % intervals"] = float(np.mean(np.abs(error) <= 1.6449 * std))
    return scores, inside.posterior.rank


def _read(header: list[str] | None, lines: int, refused: dict[str, int]) -> dict[str, Any]:
    """What was read, and what of it was refused."""
    return {"header": "none" if header is None else ", ".join(header), "lines": lines, "refused": refused}


def _say_columns(voice: Voice, taken: list[str], others: list[str]) -> None:
    """Say which columns were taken where nobody has named them and there are more than lists of entries have."""
    if others:
        row, column, value = taken
        left = counted(len(others), "column is", "columns are")
        voice.remark(
            f"row ids are from column {row}, column ids from {column}, values from {value}; {left} left "
            f"alone, from {others[0]} on; --columns names others"
        )


def _split(columns: str | None) -> tuple[str, ...] | None:
    return None if columns is None else tuple(part.strip() for part in columns.split(","))

