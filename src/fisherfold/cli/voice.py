"""How a command speaks: results on standard output, as a table or as JSON, all else on standard error, unless quiet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from fisherfold.cli.words import cell, printable
from fisherfold.plain import finite


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, text: int = 1, **look: Any) -> Table:
    """A table whose first ``text`` columns are text and the others numbers; nothing in it is markup."""
    table = Table(title=escape(printable(title)), **look)
    for place, name in enumerate(columns):
        table.add_column(escape(printable(name)), justify="left" if place < text else "right")
    for row in rows:
        table.add_row(*(escape(printable("" if value is None else cell(value))) for value in row))
    return table


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
