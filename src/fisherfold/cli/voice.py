"""How a command speaks: results on standard output, all else on standard error."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unicodedata import category

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from fisherfold.plain import finite


def grid(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, text: int = 1, **look: Any
) -> Table:
    """A table whose first ``text`` columns are text, the others numbers; no markup."""
    table = Table(title=escape(printable(title)), **look)
    for place, name in enumerate(columns):
        table.add_column(escape(printable(name)), justify="left" if place < text else "right")
    for row in rows:
        table.add_row(*(escape(printable("" if value is None else cell(value))) for value in row))
    return table


def option(default: Any, text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """A field of a dataclass that is an option of commands."""
    given = {"help": text, "rich_help_panel": panel, **more}
    return field(default=default, metadata={"names": names, "given": given})


@dataclass
class Voice:
    """How a command speaks; ``main`` reads ``debug`` off the words that were typed."""

    as_json: bool = option(
        False,
        "Print one JSON object, and nothing else, on standard output.",
        "--json",
        panel="All commands",
    )
    quiet: bool = option(
        False, "No progress and no remarks, only the result.", "-q", panel="All commands"
    )
    verbose: bool = option(False, "Report every step, time and memory.", "-v", panel="All commands")
    debug: bool = option(False, "Show the full trace of an error.", panel="All commands")
    resume: str = "no file was changed; the same command starts again"  # what Ctrl-C says

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ValueError("--quiet and --verbose exclude each other, give one of them")

    def remark(self, text: str) -> None:
        """Say something on standard error, unless quiet."""
        if not self.quiet:
            Console(stderr=True).print(
                printable(text), markup=False, highlight=False, soft_wrap=True
            )

    def detail(self, text: str) -> None:
        """Say something that only ``--verbose`` wants to hear."""
        if self.verbose:
            self.remark(text)

    def answer(self, facts: Mapping[str, Any], *shown: RenderableType) -> None:
        """Print the result of the command."""
        if self.as_json:
            # in ASCII: JSON is UTF-8, which standard output need not be, and names of files need
            # not be text
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


def cell(value: Any) -> str:
    """A value as a person reads it.

    Examples:
        >>> cell(True), cell(0.123456), cell(float("nan"))
        ('yes', '0.1235', 'undefined')
        >>> cell({"mean": 1.0, "standard error": 0.25})
        '1.0000 ± 0.2500'
        >>> cell({"mean": 1.4e-9, "standard error": 2e-11})
        '1.4e-09 ± 2e-11'
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "undefined" if value != value else f"{value:{_form(value)}}"
    if isinstance(value, Mapping) and "standard error" in value:
        form = _form(value["mean"])
        return f"{value['mean']:{form}} ± {value['standard error']:{form}}"
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {cell(item)}" for key, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value)) or "none"
    return str(value)


def printable(text: str) -> str:
    r"""Replace what a terminal would take as commands, and what is no text.

    Examples:
        >>> printable("red \x1b[31m, caf\udce9, é")
        'red ?[31m, caf?, é'
    """
    return "".join("?" if category(c) in {"Cc", "Cs"} and c not in "\t\n" else c for c in text)


def typed(*arguments: object) -> str:
    """Arguments as a shell takes them.

    Examples:
        >>> typed("my model", 42)
        "'my model' 42"
        >>> typed("model", -7)
        '-- model -7'
    """
    words = [str(argument) for argument in arguments]
    return shlex.join(["--", *words] if any(word.startswith("-") for word in words) else words)


def _form(value: float) -> str:
    return ".4f" if 1e-3 <= abs(value) < 1e6 else ".4g"
