"""The command line: one voice for fitting, reproducing and inspecting.

Each command family lives in a file of its own and is attached here. What makes a command of a
function is in ``common``, with what becomes of an error; how it speaks is in ``voice``, options of
several families in ``options``.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from fisherfold._version import __version__
from fisherfold.cli import complete, datasets, reproduce, subspace
from fisherfold.cli.common import (
    DONE,
    FAILED,
    command,
    exit_code,
    group,
    is_usage,
    report,
    signals_as_interrupts,
)
from fisherfold.cli.demo import demo
from fisherfold.cli.info import info
from fisherfold.cli.serve import serve

_CLOSED = "standard output is closed, and the result would be lost; redirect it, as in > /dev/null"

app = group(
    "Maximum likelihood on manifolds with the Riemannian Fisher information.\n\n"
    "Start with `fisherfold demo`. Exit codes: 0 done, 1 declined or an unexpected error, 2 an "
    "option, a file or data "
    "cannot be used, 130 interrupted.",
    examples=["fisherfold demo", "fisherfold complete fit ratings.csv -o model/"],
)
command(app, examples=["fisherfold demo", "fisherfold demo --output pictures --seed 1"])(demo)
command(app, examples=["fisherfold info", "fisherfold info --json"])(info)
command(
    app,
    examples=["fisherfold serve model/", "fisherfold serve model/ --titles films.csv --workers 2"],
)(serve)
app.add_typer(complete.app, name="complete")
app.add_typer(subspace.app, name="subspace")
app.add_typer(reproduce.app, name="reproduce")
app.add_typer(datasets.app, name="datasets")


def _show_version(value: bool) -> None:
    if value:
        print(f"fisherfold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the full trace of an error.")
    ] = False,
) -> None:
    """Options before the name of a command; ``--debug`` is read by ``main``."""


def main() -> None:
    """Run the command line; an error becomes one sentence and a hint, and an exit code."""
    # a stream is None where it is closed
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        raise SystemExit(
            report(OSError(_CLOSED), _path(sys.argv[1:]), as_json="--json" in sys.argv)
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as ``__main__`` leaves it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a result is not lost because standard output has no sign for ± or é
    try:
        with signals_as_interrupts():
            code = app(prog_name="fisherfold", standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:  # who reads the result has seen enough, as in "| head"
        _to_nowhere(sys.stdout)
        code = 128 + 13
    except KeyboardInterrupt as stop:
        code = exit_code(stop)
    except typer.Abort as no:
        # typer makes one of an interrupt too, where no command is under way
        code = exit_code(no.__cause__) if isinstance(no.__cause__, KeyboardInterrupt) else FAILED
        if code == FAILED:
            print("stopped: not confirmed", file=sys.stderr)
    except Exception as error:
        if "--debug" in sys.argv and not is_usage(error):
            raise
        code = report(error, _path(sys.argv[1:]), as_json="--json" in sys.argv)
        _to_nowhere(sys.stdout)
    raise SystemExit(code or DONE)


def _to_nowhere(stream: Any) -> None:
    """Let what a stream still holds go where it can be written, so that Python's end is silent."""
    try:
        stream.flush()
    except (OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def _path(words: list[str]) -> str:
    """The command that some words name, as in ``fisherfold complete fit``."""
    node: Any = typer.main.get_command(app)
    found = ["fisherfold"]
    for word in words:
        node = getattr(node, "commands", {}).get(word)
        if node is None:
            break
        found.append(word)
    return " ".join(found)
