"""How a command speaks: results on standard output, as a table or as JSON, all else on standard error, unless quiet."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from fisherfold.cli.words import cell, printable
from fisherfold.plain import finite


@dataclass
class Voice:
    """How a command speaks.

    Attributes:
        as_json: results are JSON.
        quiet: nothing but results.
        verbose: every step.
        debug: errors show their trace; ``main`` reads it off the words that were typed.
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
        """Say something on standard error, unless quiet."""
        if not self.quiet:
            Console(stderr=True).print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Say something that only ``--verbose`` wants to hear."""
        if self.verbose:
            self.remark(text)

    def answer(self, facts: Mapping[str, Any], *shown: RenderableType) -> None:
        """Print the result of the command."""
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
        """Print facts as a table of two columns, or as JSON."""
        table = Table(title=escape(printable(title)), show_header=False)
        for name, value in facts.items():
            table.add_row(escape(printable(str(name))), escape(printable(cell(value))))
        self.answer(facts, table)

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Bar]:
        """A bar with the time left while a block runs."""
        whole = Column(no_wrap=True)  # in a narrow terminal the bar gives way, not the times
        times = TimeElapsedColumn(table_column=whole), TextColumn("left"), TimeRemainingColumn(table_column=whole)
        columns = TextColumn("{task.description}"), BarColumn(bar_width=24), *times
        # quiet, since rich before 14.3 ends the line of a bar that is not shown
        console = Console(stderr=True, quiet=not self.shows_progress)
        # the mean over many steps: single ones differ too much for a shorter window
        shown = Progress(
            *columns, console=console, transient=True, disable=not self.shows_progress, speed_estimate_period=600,
        )  # fmt: skip
        with shown:
            yield Bar(self, shown, what, total)


class Bar:
    """A line of progress."""

    def __init__(self, voice: Voice, progress: Progress, what: str, total: int | None) -> None:
        self._voice, self._progress = voice, progress
        self._task = progress.add_task(escape(what), total=total)

    def say(self, what: str) -> None:
        """Say what is under way now."""
        self._progress.update(self._task, description=escape(what))
        self._voice.detail(what)

    def tick(self, done: float, total: float | None = None) -> None:
        """Say how much is done."""
        # rich keeps the total where it is given none
        self._progress.update(self._task, completed=done, total=total)

    def advance(self) -> None:
        """One step more is done."""
        self._progress.advance(self._task)

    def another(self, what: str, total: int | None = None) -> Bar:
        """A further line below."""
        return Bar(self._voice, self._progress, what, total)
