"""``fisherfold subspace``: many small related regressions or classifications from a table."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fisherfold.cli.common import command, group
from fisherfold.cli.options import Checkpoint, Decimal, Encoding, UnpackLimit, in_bytes, one_of
from fisherfold.cli.outputs import Output, Predictions, check_output, check_predictions, say_written, write_or_rescue
from fisherfold.cli.voice import Bar, Voice
from fisherfold.cli.words import named, typed
from fisherfold.plain import counted

if TYPE_CHECKING:
    from fisherfold.subspace.task_tables import Roles, TaskTable

app = group(
    "Fit many small related regressions or classifications that share a subspace.",
    examples=["fisherfold subspace fit pupils.csv --target score --task school -o model/"],
)

Data = Annotated[Path, typer.Argument(help="A table with a header: CSV, TSV or Parquet; - reads standard input.")]
Unseen = Annotated[
    str,
    typer.Option(
        "--unseen",
        help="Tasks that were not in the fit: error, or mean (predict what all tasks share).",
        autocompletion=one_of("error", "mean"),
    ),
]
Model = Annotated[
    Path,
    typer.Argument(help="A folder written by `fisherfold subspace fit`.", callback=named("the model", "a folder")),
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
    target: Annotated[str, typer.Option("--target", help="The column to predict.")],
    output: Output,
    task: Annotated[str | None, typer.Option("--task", help="The column that names the task of each row.")] = None,
    features: Annotated[
        str | None, typer.Option("--features", help="Feature columns, separated by commas; all others if not given.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", "-r", help="The dimension of the subspace; 6 or fewer if not given.")
    ] = None,
    inference: Annotated[
        str | None,
        typer.Option(
            "--inference", help="Of a regression: marginal or point.", show_default="marginal",
            autocompletion=one_of("marginal", "point"),
        ),
    ] = None,
    classify: Annotated[bool, typer.Option("--classify", help="The target has two classes.")] = False,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Seed of everything random.")] = 0,
    encoding: Encoding = None,
    decimal: Decimal = None,
    unpack_limit: UnpackLimit = 4.0,
    checkpoint: Checkpoint = None,
) -> None:
    """Fit a model and keep it in a folder; under torchrun its processes share the work."""
    from fisherfold.distributed import under_torchrun
    from fisherfold.subspace.classifier import SubspaceClassifier
    from fisherfold.subspace.files import KIND, save_model
    from fisherfold.subspace.regressor import SubspaceRegressor
    from fisherfold.subspace.task_tables import choose_columns, rows_of
    from fisherfold.tables.table_files import read_table
    from fisherfold.tables.table_sources import spoken

    check_output(output, KIND)
    if classify and inference is not None:
        raise ValueError(f"--inference is for regressions, got {inference!r} with --classify, which has one way")
    estimator = "SubspaceClassifier" if classify else "SubspaceRegressor"
    chosen = None if features is None else [name.strip() for name in features.split(",") if name.strip()]
    reading: dict[str, Any] = {"encoding": encoding, "decimal": decimal, "max_bytes": in_bytes(unpack_limit)}
    naming: dict[str, Any] = {"target": target, "task": task, "features": chosen, "estimator": estimator}
    resumed = checkpoint is not None and checkpoint.exists()
    model: Any = SubspaceClassifier(rank, random_state=seed, checkpoint=checkpoint)
    if not classify:
        model = SubspaceRegressor(rank, inference=inference or "marginal", random_state=seed, checkpoint=checkpoint)
    began = time.perf_counter()
    again = "starts again" if checkpoint is None else f"goes on from {checkpoint}"
    voice.resume = f"no model was written; the same command {again}"
    if under_torchrun():
        if classify or encoding is not None:
            raise ValueError("over several processes there is regression from UTF-8 text, no --classify or --encoding")
        _fit_shared(voice, model, data, output, {**naming, "decimal": decimal}, began, resumed)
        return
    read = read_table(data, header=True, **reading)
    roles = choose_columns(read.frame, **naming)
    table = rows_of(read, spoken(data), roles, with_target=True, numeric_target=not classify, decimal=decimal)
    with voice.progress(f"fitting {counted(len(table.X), 'row', form=',')}", model.max_iter) as bar:
        _watch(model, bar)
        model.fit(table.X, table.y, task=table.task)
        del model.__dict__["_show"]
    write_or_rescue(partial(save_model, model=model, with_statistics=True, columns=asdict(roles)), output)
    seconds = time.perf_counter() - began
    kept = {} if checkpoint is None else {"went on from a checkpoint": resumed}
    voice.result("Fitted", {"model": str(output), **_facts(model, table), "seconds": seconds, **kept})
    voice.remark(f"next: fisherfold subspace evaluate {typed(output, 'HELD_OUT_ROWS.csv')}")


def _fit_shared(
    voice: Voice, model: Any, data: Path, output: Path, naming: dict[str, Any], began: float, resumed: bool
) -> None:
    """Fit together with the other processes of torchrun; the first one writes the model."""
    from fisherfold.distributed import joined
    from fisherfold.subspace.files import save_model
    from fisherfold.subspace.task_tables import read_task_share
    from fisherfold.tables.file_shares import joint_counts

    with joined() as processes:
        roles, table = read_task_share(data, processes, **naming)
        rows = joint_counts({"rows": len(table.X)}, processes)["rows"]
        refused = joint_counts(table.refused, processes)
        model.fit_share(table.X, table.y, task=table.task)
        with processes.together():
            if processes.is_first:
                write = partial(save_model, model=model, with_statistics=False, columns=asdict(roles))
                write_or_rescue(write, output)
    if processes.is_first:
        read = {"lines": rows + sum(refused.values()), "refused": refused, "decimal mark": table.decimal, "rows": rows}
        kept = {} if model.checkpoint is None else {"went on from a checkpoint": resumed}
        seconds = time.perf_counter() - began
        facts = {**_learnt(model), "processes": processes.size, "seconds": seconds, **kept}
        voice.result("Fitted", {"model": str(output), **read, **facts})


@command(app, examples=["fisherfold subspace predict model/ new.csv --std -o predictions.csv"])
def predict(
    voice: Voice,
    model: Model,
    data: Data,
    output: Predictions,
    std: Annotated[bool, typer.Option("--std", help="Add predictive standard deviations.")] = False,
    unseen: Unseen = "error",
    encoding: Encoding = None,
    decimal: Decimal = None,
    unpack_limit: UnpackLimit = 4.0,
) -> None:
    """Write a table with predictions added to it."""
    from fisherfold.subspace.task_tables import read_tasks
    from fisherfold.tables.table_output import write_predictions
    from fisherfold.tables.table_sources import spoken

    check_predictions(output, voice)
    roles, fitted = _load(model)
    reading: dict[str, Any] = {"encoding": encoding, "max_bytes": in_bytes(unpack_limit)}
    table = read_tasks(data, roles, with_target=False, decimal=decimal, **reading).known_to(fitted)
    options = {"return_std": True} if std else {}
    if std and roles.estimator != "SubspaceRegressor":
        raise ValueError("--std needs a regression model")
    found = fitted.predict(table.X, task=table.task, unseen=unseen, **options)
    values, deviations = found if std else (found, None)
    added = {f"{roles.target}_predicted": values} | ({} if deviations is None else {f"{roles.target}_std": deviations})
    write_predictions(table.frame, added, spoken(data), output, table.decimal)
    say_written(voice, _read(table), output, "output")


@command(app, examples=["fisherfold subspace evaluate model/ held_out.csv"])
def evaluate(
    voice: Voice, model: Model, data: Data, unseen: Unseen = "error", encoding: Encoding = None,
    decimal: Decimal = None, unpack_limit: UnpackLimit = 4.0,
) -> None:  # fmt: skip
    """Compare predictions with known targets."""
    from fisherfold.subspace.task_tables import read_tasks
    from fisherfold.tables.table_sources import spoken

    roles, fitted = _load(model)
    regression = roles.estimator == "SubspaceRegressor"
    table = read_tasks(
        data, roles, with_target=True, numeric_target=regression, decimal=decimal, encoding=encoding,
        max_bytes=in_bytes(unpack_limit),
    ).known_to(fitted)  # fmt: skip
    facts: dict[str, Any] = {**_read(table), "tasks": 1 if table.task is None else len(set(table.task.tolist()))}
    if regression:
        facts |= _regression_errors(fitted, table, unseen)
    else:
        from sklearn.metrics import log_loss

        known, given = (list(map(str, values)) for values in (fitted.classes_.tolist(), table.classes()))
        if new := [name for name in given if name not in known]:
            told = f"column {roles.target!r} holds {', '.join(new[:5])}"
            raise ValueError(f"{spoken(data)}: {told}; the classes are {', '.join(known)}")
        probabilities = fitted.predict_proba(table.X, task=table.task, unseen=unseen)
        facts["accuracy"] = fitted.score(table.X, table.y, task=table.task, unseen=unseen)
        facts["log_loss"] = float(log_loss(table.y, probabilities, labels=fitted.classes_))
    voice.result("Held-out errors", facts)


def _load(folder: Path) -> tuple[Roles, Any]:
    from fisherfold.subspace.classifier import SubspaceClassifier
    from fisherfold.subspace.files import load_model
    from fisherfold.subspace.regressor import SubspaceRegressor
    from fisherfold.subspace.task_tables import Roles

    model: Any = load_model(folder, SubspaceRegressor, SubspaceClassifier)
    return Roles.of(model, folder), model


def _read(table: TaskTable) -> dict[str, Any]:
    """What was read, and what of it was refused."""
    rows = len(table.X)
    lines = rows + sum(table.refused.values())
    return {"lines": lines, "refused": table.refused, "decimal mark": table.decimal, "rows": rows}


def _regression_errors(model: Any, table: TaskTable, unseen: str) -> dict[str, float]:
    import numpy as np

    how: dict[str, Any] = {"task": table.task, "unseen": unseen}
    predicted = model.predict(table.X, **how)
    errors = {
        "rmse": float(np.sqrt(np.mean((predicted - table.y) ** 2))),
        "r2": model.score(table.X, table.y, **how),
    }
    try:
        errors["nmse"] = model.nmse(table.X, table.y, **how)
    except ValueError:
        # every task has a single row or a constant target
        errors["nmse"] = math.nan
    return errors


def _learnt(model: Any) -> dict[str, Any]:
    facts = {
        "tasks": len(model.task_ids_),
        "features": model.n_features_in_,
        "rank": model.components_.shape[1],
        "rounds": model.n_iter_,
    }
    if hasattr(model, "noise_variance_"):
        facts["noise (mean standard deviation)"] = float((model.noise_variance_**0.5).mean())
    if hasattr(model, "ridge_"):
        facts["ridge"] = model.ridge_
    return facts


def _facts(model: Any, table: TaskTable) -> dict[str, Any]:
    name = "training accuracy" if hasattr(model, "classes_") else "training R²"
    return {**_read(table), **_learnt(model), name: model.score(table.X, table.y, task=table.task)}


def _watch(model: Any, bar: Bar) -> None:
    """Show the rounds of a fit."""

    def show(row: Any) -> bool:
        number, loss = (row["round"], row["loss"]) if isinstance(row, dict) else (row.iteration, row.loss)
        bar.say(f"round {int(number)}: loss {loss:.6f}")
        bar.tick(int(number))
        return False

    model.__dict__["_show"] = show
