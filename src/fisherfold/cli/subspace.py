"""``fisherfold subspace``: many small related regressions or classifications from a table."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fisherfold.cli.common import command, group
from fisherfold.cli.options import (
    Folder,
    Output,
    Predictions,
    Reading,
    Seed,
    SkipBadLines,
    Timeout,
    check_output,
    check_predictions,
    say_written,
    write_or_rescue,
)
from fisherfold.cli.voice import Voice, typed
from fisherfold.progress import track

if TYPE_CHECKING:
    import polars as pl

    from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
    from fisherfold.tables.readers import Table

app = group(
    "Fit many small related regressions or classifications that share a subspace.",
    examples=["fisherfold subspace fit pupils.csv --target score --task school -o model/"],
)
_MEANING = (
    "r2 is of all rows together; nmse is the mean over tasks of squared error over the variance of "
    "the task's targets, "
    "in which every task counts the same: the two do not add up to 1"
)

Data = Annotated[
    Path, typer.Argument(help="A table with a header: CSV, TSV or Parquet; - reads standard input.")
]
Unseen = Annotated[
    Literal["error", "mean"],
    typer.Option(
        help="Tasks that were not in the fit: error, or mean (predict what all tasks share)."
    ),
]


@command(
    app,
    examples=[
        "fisherfold subspace fit pupils.csv --target score --task school -o model/",
        "fisherfold subspace fit patients.csv --target ill --task ward --classify -o model/",
    ],
)
def fit(
    voice: Voice,
    data: Data,
    target: Annotated[str, typer.Option(help="The column to predict.")],
    output: Output,
    *,
    task: Annotated[
        str | None, typer.Option(help="The column that names the task of each row.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(help="Feature columns, separated by commas; all others if not given."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", "-r", help="The dimension of the subspace; 6 or fewer if not given."
        ),
    ] = None,
    inference: Annotated[
        Literal["marginal", "point"] | None,
        typer.Option(help="Of a regression: marginal or point.", show_default="marginal"),
    ] = None,
    classify: Annotated[
        bool, typer.Option("--classify", help="The target has two classes.")
    ] = False,
    seed: Seed = 0,
    reading: Reading,
    skip_bad_lines: SkipBadLines = False,
    timeout: Timeout = 300.0,
) -> None:
    """Fit a model and keep it in a folder; under torchrun its processes share the work."""
    from fisherfold.distributed import joined, under_torchrun
    from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
    from fisherfold.subspace.files import KIND, save_model
    from fisherfold.tables.agreement import check_same_file

    check_output(output, KIND)
    if classify and inference is not None:
        raise ValueError(f"--inference is for regressions, got {inference!r} with --classify")
    shared = under_torchrun()
    if shared and (classify or task is None):
        raise ValueError("over several processes there is regression with --task, no --classify")
    model: Any = SubspaceClassifier(rank, random_state=seed, verbose=voice.verbose)
    if not classify:
        model = SubspaceRegressor(
            rank, inference=inference or "marginal", random_state=seed, verbose=voice.verbose
        )
    began = time.perf_counter()
    voice.resume = "no model was written; the same command starts again"
    with joined(timeout) as processes:
        if shared:
            check_same_file(data, processes)
        with processes.together():
            part = (processes.rank, processes.size) if shared else (0, 1)
            table = read_rows(data, reading, skip_bad_lines=skip_bad_lines, part=part)
            chosen = choose_features(
                table, target, task, None if features is None else features.split(",")
            )
            X, y = to_numbers(
                table, chosen, target, task, decimal=reading.decimal, classify=classify
            )
        if shared:
            model.fit_share(X, y, task=task)
        else:
            model.fit(X, y, task=task)
        with processes.together():
            if processes.is_first:
                write_or_rescue(
                    partial(save_model, model=model, with_statistics=not shared), output
                )
        counts = processes.gather_objects((len(X), table.rejected))
    if not processes.is_first:
        return
    rejected: dict[str, int] = {}
    for _, part in counts:
        rejected = {
            reason: rejected.get(reason, 0) + part.get(reason, 0) for reason in rejected | part
        }
    facts = {
        "model": str(output),
        **_read(sum(count for count, _ in counts), rejected),
        **_learnt(model),
    }
    if not shared:
        facts["training accuracy" if classify else "training R²"] = model.score(X, y)
    else:
        facts["processes"] = processes.size
    voice.result("Fitted", {**facts, "seconds": time.perf_counter() - began})
    voice.remark(f"next: fisherfold subspace evaluate {typed(output, 'HELD_OUT_ROWS.csv')}")


@command(app, examples=["fisherfold subspace predict model/ new.csv --std -o predictions.csv"])
def predict(
    voice: Voice,
    model: Folder,
    data: Data,
    output: Predictions,
    *,
    std: Annotated[bool, typer.Option("--std", help="Add predictive standard deviations.")] = False,
    unseen: Unseen = "error",
    reading: Reading,
) -> None:
    """Write a table with predictions added to it."""
    from fisherfold.tables.writers import add_columns, write_table

    check_predictions(output, voice)
    fitted = _load(model)
    if std and hasattr(fitted, "classes_"):
        raise ValueError("--std needs a regression model")
    table = read_rows(data, reading)
    X, _ = to_numbers(
        table, list(fitted.feature_names_in_), None, fitted.task_column_, decimal=reading.decimal
    )
    found = fitted.predict(X, unseen=unseen, **({"return_std": True} if std else {}))
    name = fitted.target_name_
    added = (
        {f"{name}_predicted": found[0], f"{name}_std": found[1]}
        if std
        else {f"{name}_predicted": found}
    )
    write_table(add_columns(table.frame, added, table.path), output, reading.decimal)
    say_written(voice, "Predicted", _read(len(X), table.rejected), output)


@command(app, examples=["fisherfold subspace evaluate model/ held_out.csv"])
def evaluate(
    voice: Voice, model: Folder, data: Data, *, unseen: Unseen = "error", reading: Reading
) -> None:
    """Compare predictions with known targets."""
    import numpy as np

    fitted = _load(model)
    classify = hasattr(fitted, "classes_")
    table = read_rows(data, reading)
    X, y = to_numbers(
        table,
        list(fitted.feature_names_in_),
        fitted.target_name_,
        fitted.task_column_,
        decimal=reading.decimal,
        classify=classify,
    )
    tasks = 1 if fitted.task_column_ is None else X[fitted.task_column_].n_unique()
    facts: dict[str, Any] = {**_read(len(X), table.rejected), "tasks": tasks}
    if classify:
        from sklearn.metrics import log_loss

        if new := sorted(set(map(str, y.to_list())) - set(map(str, fitted.classes_.tolist()))):
            told = f"column {fitted.target_name_!r} holds {', '.join(new[:5])}"
            raise ValueError(
                f"{table.path}: {told}; the classes are {', '.join(map(str, fitted.classes_))}"
            )
        # in one file 1 is a number, in another text: classes are compared by their text
        names = {str(label): label for label in fitted.classes_.tolist()}
        labels = np.array([names[str(label)] for label in y.to_list()])
        facts["accuracy"] = fitted.score(X, labels, unseen=unseen)
        probabilities = fitted.predict_proba(X, unseen=unseen)
        facts["log_loss"] = float(log_loss(labels, probabilities, labels=fitted.classes_))
        voice.result("Held-out errors", facts)
        return
    predicted = fitted.predict(X, unseen=unseen)
    facts["rmse"] = float(np.sqrt(np.mean((predicted - y.to_numpy()) ** 2)))
    facts["r2"] = fitted.score(X, y, unseen=unseen)
    try:
        facts["nmse"] = fitted.nmse(X, y, unseen=unseen)
    except ValueError:  # every task has a single row or a constant target
        facts["nmse"] = math.nan
    voice.result("Held-out errors", facts)
    voice.remark(_MEANING)


def read_rows(data: Path, reading: Reading, **how: Any) -> Table:
    """Read a table with a header."""
    from fisherfold.tables.readers import read_table

    with track(f"reading {data.name}"):
        return read_table(data, header=True, **how, **reading.format())


def choose_features(
    table: Table, target: str, task: str | None, features: list[str] | None
) -> list[str]:
    """All columns but target and task are features unless some are named."""
    names = table.frame.columns
    features = None if features is None else [name.strip() for name in features if name.strip()]
    for option, name in (
        ("--target", target),
        ("--task", task),
        *(("--features", f) for f in features or []),
    ):
        if name is not None and name not in names:
            raise ValueError(
                f"{option} {name}: there is no such column; the columns are {', '.join(names)}"
            )
    if target == task:
        raise ValueError(f"--target and --task must be two columns, both are {target}")
    if features is None:
        features = [name for name in names if name not in {target, task}]
        indexes = [name for name in features if name.startswith("__index_level_")]
        if table.header and table.header[0] == "":
            indexes.insert(0, names[0])
        if indexes:
            raise ValueError(
                f"the column {indexes[0]} is the index of a data frame, numbers of lines and "
                "hardly a feature; write "
                "the file with index=False, or name the features (--features)"
            )
    if target in features or len(set(features)) < len(features):
        raise ValueError(
            f"--features must name each column once, and not the target, got {', '.join(features)}"
        )
    if not features:
        raise ValueError("no feature columns are left besides the target and the task")
    return features


def to_numbers(
    table: Table,
    features: list[str],
    target: str | None,
    task: str | None,
    *,
    decimal: str,
    classify: bool = False,
) -> tuple[pl.DataFrame, pl.Series]:
    """The features and tasks of a table as a data frame of numbers and ids, and its targets."""
    import polars as pl

    from fisherfold.tables.readers import ids, numbers

    frame = table.frame
    path = table.path
    needed = [*features, *([task] if task else []), *([target] if target else [])]
    if absent := [name for name in needed if name not in frame.columns]:
        raise ValueError(
            f"{path}: the columns {', '.join(absent)} are missing; it has "
            f"{', '.join(frame.columns)}"
        )

    def checked(name: str) -> pl.Series:
        parsed = numbers(frame[name], decimal, path)
        bad = (parsed.is_null() | ~parsed.is_finite().fill_null(False)).arg_true()
        if len(bad):
            seen = frame[name][int(bad[0])]
            what = (
                "is missing"
                if seen is None or not str(seen).strip()
                else f"is {seen!r}, a number is expected"
            )
            where = f"{path}: column {name!r} {what} in data line {int(bad[0]) + 1}"
            if len(bad) == len(parsed):
                where += (
                    "; for two classes fit with --classify"
                    if name == target
                    else (
                        f"; does it name the tasks (--task {name}), or should --features leave it "
                        "out?"
                    )
                )
            raise ValueError(where)
        return parsed

    X = pl.DataFrame([checked(name) for name in features])
    if task is not None:
        X = X.with_columns(pl.Series(task, ids(frame[task], path)))
    if target is None:
        return X, pl.Series()
    y = pl.Series(target, ids(frame[target], path)) if classify else checked(target)
    return X, y


def _load(folder: Path) -> SubspaceRegressor | SubspaceClassifier:
    from fisherfold.subspace import SubspaceClassifier, SubspaceRegressor
    from fisherfold.subspace.files import load_model

    model: Any = load_model(folder, SubspaceRegressor, SubspaceClassifier)
    if getattr(model, "feature_names_in_", None) is None or model.target_name_ is None:
        raise ValueError(
            f"{folder} does not name its columns: it was not written by `fisherfold subspace fit`"
        )
    return model


def _read(rows: int, rejected: dict[str, int]) -> dict[str, Any]:
    """What was read, and what of it was rejected."""
    return {"lines": rows + sum(rejected.values()), "rejected": rejected, "rows": rows}


def _learnt(model: Any) -> dict[str, Any]:
    facts = {
        "tasks": len(model.task_ids_),
        "features": model.n_features_in_,
        "rank": model.components_.shape[1],
        "rounds": model.n_iter_,
    }
    if hasattr(model, "log_likelihood_"):
        facts["noise (mean standard deviation)"] = float((model.noise_variance_**0.5).mean())
        facts["log likelihood"] = model.log_likelihood_
    if hasattr(model, "ridge_"):
        facts["ridge"] = model.ridge_
    return facts
