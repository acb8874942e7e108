"""One voice for every command: the shared options, results, progress, errors and interrupts, in one place.

A command is a function whose first argument is a ``Voice``, attached with ``command``::

    @command(app, examples=["fisherfold train resnet20 --epochs 10"])
    def train(voice: Voice, model: Annotated[str, typer.Argument(help="Which network.")]) -> None:
        \"\"\"What it does, in one sentence.\"\"\"
        with voice.progress("training") as bar:
            ...                                   # bar.say("epoch 3"), bar.tick(3, 10)
        voice.result("Trained", {"accuracy": 0.9})

That gives it ``--json``, ``--quiet``, ``--verbose``, ``--debug``, examples in its help and the exit codes

    0    done
    1    declined by the user, or an error that is not the user's
    2    an option, a file or data that cannot be used
    130  interrupted; ``voice.resume`` says how to go on; 143 and 129 by SIGTERM and SIGHUP

Results go to standard output, everything else to standard error. ``tests/cli/test_voice.py`` walks over all commands.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from fisherfold.cli.signals import exit_code
from fisherfold.cli.words import cell, named, printable
from fisherfold.plain import finite

DONE, FAILED, UNUSABLE = 0, 1, 2
# errors of these kinds are about what the user gave or the machine has; the message alone helps
THEIRS = (ValueError, TypeError, OSError, MemoryError, ImportError)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks, only the result.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say every step, the time and the memory it took.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full trace of an error.")]
Encoding = Annotated[
    str | None, typer.Option("--encoding", help="Of text that is neither UTF-8 nor UTF-16, such as latin-1.")
]
Decimal = Annotated[
    str | None,
    typer.Option("--decimal", help="The decimal mark of numbers, . or , (found out if not given).", metavar="MARK"),
]
UnpackLimit = Annotated[
    float,
    typer.Option("--unpack-limit", min=0, help="The most GiB that a packed file may take unpacked.", metavar="GIB"),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", help="Keep where the fit stands in this file; the same command goes on from it.",
        callback=named("--checkpoint", "a file"),
    ),
]  # fmt: skip
_SHARED = {"as_json": AsJson, "quiet": Quiet, "verbose": Verbose, "debug": Debug}


@dataclass
class Voice:
    """How a command speaks.

    Attributes:
        as_json: results are JSON.
        quiet: nothing but results.
        verbose: every step.
        debug: errors show their trace; read by ``report``.
        resume: what Ctrl-C says about going on.
    """

    as_json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    resume: str = "no file was changed; the same command starts again"

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ValueError("--quiet and --verbose exclude each other, give one of them")

    @property
    def shows_progress(self) -> bool:
        """Whether somebody is there to see a bar."""
        return not self.quiet and sys.stderr.isatty()

    def remark(self, text: str) -> None:
        """Say something on standard error, unless quiet.

        Args:
            text: a sentence.
        """
        if not self.quiet:
            Console(stderr=True).print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Say something that only ``--verbose`` wants to hear.

        Args:
            text: a sentence.
        """
        if self.verbose:
            self.remark(text)

    def answer(self, facts: Mapping[str, Any], *shown: RenderableType) -> None:
        """Print the result of the command.

        Args:
            facts: what machines read.
            *shown: what people read; strings are printed as they are.
        """
        if self.as_json:
            # in ASCII: JSON is UTF-8, which standard output need not be, and names of files need not be text
            print(json.dumps(finite(facts), default=str))
            return
        for each in shown:
            if isinstance(each, str):
                Console().print(printable(each), highlight=False, soft_wrap=True, markup=False)
                continue
            for column in each.columns if isinstance(each, Table) else ():
                column.overflow = "fold"  # a path or a checksum that ends in … is none
            Console().print(each, highlight=False)

    def result(self, title: str, facts: Mapping[str, Any]) -> None:
        """Print facts as a table of two columns, or as JSON.

        Args:
            title: the title of the table.
            facts: names and values.
        """
        table = Table(title=escape(printable(title)), show_header=False)
        for name, value in facts.items():
            table.add_row(escape(printable(str(name))), escape(printable(cell(value))))
        self.answer(facts, table)

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Bar]:
        """A bar with the time left while a block runs.

        Args:
            what: what is under way.
            total: of how many steps, if that is known.

        Yields:
            The bar.
        """
        whole = Column(no_wrap=True)  # in a narrow terminal the bar gives way, not the times
        times = TimeElapsedColumn(table_column=whole), TextColumn("left"), TimeRemainingColumn(table_column=whole)
        columns = TextColumn("{task.description}"), BarColumn(bar_width=24), *times
        # the mean over many steps: single ones differ too much for a shorter window
        shown = Progress(
            *columns, console=Console(stderr=True), transient=True, disable=not self.shows_progress,
            speed_estimate_period=600,
        )  # fmt: skip
        with shown:
            yield Bar(self, shown, what, total)


class Bar:
    """A line of progress.

    Args:
        voice: tells it whether steps are said as well.
        progress: where it is drawn.
        what: what is under way.
        total: of how many steps.
    """

    def __init__(self, voice: Voice, progress: Progress, what: str, total: int | None) -> None:
        self._voice, self._progress = voice, progress
        self._task = progress.add_task(escape(what), total=total)

    def say(self, what: str) -> None:
        """Say what is under way now.

        Args:
            what: a few words.
        """
        self._progress.update(self._task, description=escape(what))
        self._voice.detail(what)

    def tick(self, done: float, total: float | None = None) -> None:
        """Say how much is done.

        Args:
            done: how much.
            total: of how much, if that has become known.
        """
        # rich keeps the total where it is given none
        self._progress.update(self._task, completed=done, total=total)

    def advance(self) -> None:
        """One step more is done."""
        self._progress.advance(self._task)

    def another(self, what: str, total: int | None = None) -> Bar:
        """A further line below.

        Args:
            what: what it counts.
            total: of how many.

        Returns:
            The line.
        """
        return Bar(self._voice, self._progress, what, total)


def group(text: str, *, examples: Sequence[str]) -> typer.Typer:
    """A family of commands.

    Args:
        text: its help.
        examples: whole command lines, shown in its help.

    Returns:
        The application to attach commands to.
    """
    return typer.Typer(
        help=text, epilog=_epilog(examples), no_args_is_help=True, rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )  # fmt: skip


def _epilog(examples: Sequence[str]) -> str:
    lines = "\n\n".join(f"`{example}`" for example in examples)
    return f"Example{'s' if len(examples) > 1 else ''}:\n\n{lines}"


def command(
    app: typer.Typer, name: str | None = None, *, examples: Sequence[str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Attach a function as a command that speaks with the shared voice.

    Args:
        app: the family.
        name: its name, that of the function if not given.
        examples: whole command lines, shown in its help.

    Returns:
        A decorator; the function's first argument is the ``Voice``.
    """

    def attach(run: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
        shared = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
            for key, kind in _SHARED.items()
        ]

        @functools.wraps(run)
        def inside(**given: Any) -> None:
            voice = Voice(**{key: given.pop(key) for key in _SHARED})
            began = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.showwarning = _warn  # type: ignore[assignment]
                    _load_torch(voice)
                    run(voice, **given)
            except KeyboardInterrupt as stop:
                Console(stderr=True).print(f"stopped; {voice.resume}", markup=False, highlight=False, soft_wrap=True)
                raise typer.Exit(exit_code(stop)) from None
            voice.detail(f"took {time.perf_counter() - began:.1f} s{_memory()}")

        # typer reads the options off the signature
        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        inside.__signature__ = inspect.Signature([*keywords, *shared])  # type: ignore[attr-defined]
        inside.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        app.command(name, epilog=_epilog(examples))(inside)
        return run

    return attach


def one_of(*values: str) -> Callable[[str], list[str]]:
    """Completion of a value in the shell.

    Args:
        *values: what it can be.

    Returns:
        What ``typer.Option(autocompletion=...)`` takes.

    Examples:
        >>> one_of("both", "rows")("b")
        ['both']
    """
    return lambda incomplete: [value for value in values if value.startswith(incomplete)]


def in_bytes(limit: float) -> int:
    """A limit in GiB as a number of bytes.

    Args:
        limit: as given; it may be infinite.

    Returns:
        At most what a file can have.

    Examples:
        >>> in_bytes(0.5), in_bytes(float("inf")) == sys.maxsize
        (536870912, True)
    """
    return int(min(limit * 2**30, sys.maxsize))


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


def _warn(message: Warning | str, *_: Any) -> None:
    """Say a warning of the library without the file and the line of code that Python would show."""
    Console(stderr=True).print(f"warning: {printable(str(message))}", markup=False, highlight=False, soft_wrap=True)


def _load_torch(voice: Voice) -> None:
    """Load what takes seconds on a cold machine while a line says so."""
    if voice.shows_progress and "torch" not in sys.modules:
        with Console(stderr=True).status("loading torch"):
            import torch  # noqa: F401


def _memory() -> str:
    """The largest memory of the process so far, where the system tells it."""
    try:
        import resource
    except ImportError:
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f", {peak * (1 if sys.platform == 'darwin' else 1024) / 1e6:.0f} MB at most"
