"""Errors as one sentence with a hint, and the exit codes that tell the user's from ours."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.markup import escape

from fisherfold.cli.words import printable

DONE, FAILED, UNUSABLE = 0, 1, 2
# errors of these kinds are about what the user gave or the machine has; the message alone helps
THEIRS = (ValueError, TypeError, OSError, MemoryError, ImportError)


def report(error: Exception, path: str, *, as_json: bool = False) -> int:
    """Say an error in one sentence with a hint, on standard error.

    Args:
        error: what was raised.
        path: the command, as in ``fisherfold complete fit``.
        as_json: as one JSON object.

    Returns:
        The exit code.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        # a family without a command: its help, as it is
        error.show()  # type: ignore[attr-defined]
        return UNUSABLE
    theirs = isinstance(error, THEIRS) or is_usage(error)
    text = error.format_message() if is_usage(error) else str(error)  # type: ignore[attr-defined]
    text = printable(" ".join(text.split())) or type(error).__name__
    # named, not imported: most commands have no use for torch
    lost = type(error).__name__ == "RankLost"
    if not theirs and not lost:
        text = f"unexpected {type(error).__name__}: {text}"
    hint = f"'{path} --help' shows examples" + ("" if is_usage(error) else "; --debug shows the trace")
    if not theirs:
        hint = "run it again with --debug for the trace, and add 'fisherfold info' to a report of it"
    if lost:
        hint = "the page on several processes says how a fit goes on from its checkpoint"
    code = UNUSABLE if theirs else FAILED
    if as_json:
        print(json.dumps({"error": text, "hint": hint, "exit_code": code}), file=sys.stderr)
        return code
    console = Console(stderr=True)
    console.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
    console.print(f"[bold]hint:[/] {escape(hint)}", highlight=False, soft_wrap=True)
    return code


def is_usage(error: Exception) -> bool:
    """Whether typer raised it for words that do not parse; typer keeps the class to itself.

    Args:
        error: what was raised.

    Returns:
        True for unknown commands and options, missing ones and values of the wrong type.
    """
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def declined() -> int:
    """Say that a question was not answered with yes.

    Returns:
        The exit code.
    """
    print("stopped: not confirmed", file=sys.stderr)
    return FAILED
