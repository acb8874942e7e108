"""``fisherfold complete fit``: fit a model and save it."""

from __future__ import annotations

import time
from typing import Any

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import Columns, File, Model, app
from fisherfold.cli.complete.tables import account, size
from fisherfold.cli.options import (
    Checkpoint,
    Output,
    SkipBadLines,
    Timeout,
    check_output,
    write_or_rescue,
)
from fisherfold.cli.voice import Voice, typed


@command(
    app,
    examples=[
        "fisherfold complete fit ratings.csv --rank 10 --seed 0 -o model/",
        "fisherfold complete fit ratings.dat --separator :: --rank auto -o model/",
        "fisherfold complete fit ratings.csv --likelihood ordered -o model/",
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
    """Fit a model to a file of ratings and write it into a folder; torchrun shares the work."""
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
    if under_torchrun() and any(model.extras):
        raise ValueError("features, times and weights need a fit in one process, without torchrun")
    began = time.perf_counter()
    with joined(timeout) as processes:
        if under_torchrun():
            how = reading.format() | {"decimal": reading.decimal, "skip_bad_lines": skip_bad_lines}
            fitted.fit_file_share(file, checkpoint=checkpoint, **how)
            read = {"processes": processes.size}
        else:
            table, entries, known = model.read(file, reading, skip_bad_lines)
            read, began = account(table), time.perf_counter()
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
        **size(fitted),
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
