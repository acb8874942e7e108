"""What every command shares: its options, help, warnings, interrupts, errors and exit codes.

A command is a function whose first argument is a ``Voice``, attached with ``command``; an argument
whose type is a dataclass (``options.Reading``) stands for the options in its fields. Results go to
standard output, everything else to standard error. Exit codes: 0 done, 1 declined or an error that
is not the user's, 2 an option, a file or data that cannot be used, 130 interrupted (143 and 129 by
SIGTERM and SIGHUP).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from fisherfold import progress
from fisherfold.cli.voice import Voice, printable

_WORDS = {int: "N", float: "X", Path: "PATH"}
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
DONE = 0
FAILED = 1
UNUSABLE = 2
# errors of these kinds are about what the user gave or the machine has; the message alone helps
_THEIRS = (ValueError, TypeError, OSError, MemoryError, ImportError)


class _Short:
    """Help with one short word for what an option takes, none for a flag or argument."""

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False) or each.param_type_name == "argument":
                each.display_type_rich = lambda ctx: None
            elif each.metavar is None and each.param_type_name == "option":
                kind = each.type_descriptor.annotation
                each.metavar = "CHOICE" if get_origin(kind) is Literal else _WORDS.get(kind, "TEXT")
        return found


class _Command(_Short, TyperCommand):
    pass


class _Group(_Short, TyperGroup):
    pass


def group(text: str, *, examples: Sequence[str]) -> typer.Typer:
    """Make a family of commands."""
    return typer.Typer(
        help=text,
        epilog=_epilog(examples),
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        cls=_Group,
    )


def _epilog(examples: Sequence[str]) -> str:
    lines = "\n\n".join(f"`{example}`" for example in examples)
    return f"Example{'s' if len(examples) > 1 else ''}:\n\n{lines}"


def command(
    app: typer.Typer, name: str | None = None, *, examples: Sequence[str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Attach a function as a command that speaks with the shared voice."""

    def attach(run: Callable[..., None]) -> Callable[..., None]:
        taken = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
        groups: dict[str, Any] = {
            p.name: p.annotation for p in taken if dataclasses.is_dataclass(p.annotation)
        }
        own = [q for p in taken for q in (_options(p.annotation) if p.name in groups else [p])]
        shared = _options(Voice)

        @functools.wraps(run)
        def inside(**given: Any) -> None:
            voice = Voice(**{p.name: given.pop(p.name) for p in shared})
            progress.show(False if voice.quiet else None)
            for name, kind in groups.items():
                given[name] = kind(
                    **{each.name: given.pop(each.name) for each in dataclasses.fields(kind)}
                )
            began = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.showwarning = _warn  # type: ignore[assignment]
                    run(voice, **given)
            except KeyboardInterrupt as stop:
                state = stop.args[1] if len(stop.args) > 1 else voice.resume
                Console(stderr=True).print(
                    f"stopped; {state}", markup=False, highlight=False, soft_wrap=True
                )
                raise typer.Exit(exit_code(stop)) from None
            voice.detail(f"took {time.perf_counter() - began:.1f} s{_memory()}")

        # typer reads the options off the signature
        keywords = [p.replace(kind=_KEYWORD) for p in own]
        inside.__signature__ = inspect.Signature([*keywords, *shared])  # type: ignore[attr-defined]
        inside.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        app.command(name, epilog=_epilog(examples), cls=_Command)(inside)
        return run

    return attach


def _options(kind: Any) -> list[inspect.Parameter]:
    """The options in the fields of a dataclass."""
    hints = get_type_hints(kind)
    found = []
    for each in dataclasses.fields(kind):
        if each.metadata:
            names = each.metadata["names"]
            if not any(name.startswith("--") for name in names):
                names = (f"--{each.name.replace('_', '-')}", *names)
            how = typer.Option(*names, **each.metadata["given"])
            annotation = Annotated[hints[each.name], how]  # type: ignore[valid-type, name-defined]
            found.append(
                inspect.Parameter(each.name, _KEYWORD, default=each.default, annotation=annotation)
            )
    return found


def _warn(message: Warning | str, *_: Any) -> None:
    """Print a warning of the library without file and line of code."""
    Console(stderr=True).print(
        f"warning: {printable(str(message))}", markup=False, highlight=False, soft_wrap=True
    )


def _memory() -> str:
    """The largest memory of the process so far, where the system tells it."""
    try:
        import resource
    except ImportError:
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f", {peak * (1 if sys.platform == 'darwin' else 1024) / 1e6:.0f} MB at most"


def exit_code(stop: BaseException) -> int:
    """What a stopped command returns, as shells count it.

    Examples:
        >>> exit_code(KeyboardInterrupt()), exit_code(KeyboardInterrupt(signal.SIGTERM))
        (130, 143)
    """
    number = stop.args[0] if stop.args else signal.SIGINT
    return 128 + (number if isinstance(number, int) else signal.SIGINT)


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into interrupts, except where somebody ignores them, as nohup does.

    Left to themselves they end a process at once: processes that it has started go on, and nobody
    says how to resume.
    """
    # torchrun ends its processes so, and one that waits for another inside an operation would not
    # hear it
    names = () if "RANK" in os.environ else ("SIGTERM", "SIGHUP")
    numbers = [number for name in names if (number := getattr(signal, name, None)) is not None]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait
    raise KeyboardInterrupt(signal.Signals(number))


@contextmanager
def held_interrupts(state: str) -> Iterator[None]:
    """Let interrupts wait until the block is done; ``state`` is what the user reads then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and callable(signal.getsignal(number)):
            before[number] = signal.signal(number, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if waiting:
        raise KeyboardInterrupt(signal.Signals(waiting[0]), state)


def report(error: Exception, path: str, *, as_json: bool = False) -> int:
    """Print an error as one sentence with a hint, on standard error."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]  # a family without a command: its help
        return UNUSABLE
    usage = is_usage(error)
    theirs = isinstance(error, _THEIRS) or is_usage(error)
    text = printable(" ".join((error.format_message() if usage else str(error)).split()))  # type: ignore[attr-defined]
    text = text or type(error).__name__
    code = UNUSABLE if theirs else FAILED
    if theirs:
        hint = f"'{path} --help' shows examples" + ("" if usage else "; --debug shows the trace")
    elif (
        type(error).__name__ == "RankLost"
    ):  # named, not imported: most commands have no use for torch
        hint = (
            "the page on several processes says how a fit resumes from its checkpoint; "
            "--timeout sets the wait"
        )
    else:
        text = f"unexpected {type(error).__name__}: {text}"
        hint = (
            "run it again with --debug for the trace, and add 'fisherfold info' to a report of it"
        )
    if as_json:
        print(json.dumps({"error": text, "hint": hint, "exit_code": code}), file=sys.stderr)
        return code
    console = Console(stderr=True)
    console.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
    console.print(f"[bold]hint:[/] {escape(hint)}", highlight=False, soft_wrap=True)
    return code


def is_usage(error: Exception) -> bool:
    """Tell whether typer raised an error for words that do not parse."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")
