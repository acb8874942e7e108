"""``fisherfold datasets``: what is there, where it comes from, and how to get it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="The named data sets: list, describe, fetch and verify them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The name of the data set, as in the list.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command("list")
def list_sets(as_json: AsJson = False) -> None:
    """List the data sets and where each of them is.

    Example: `fisherfold datasets list`
    """
    from fisherfold.datasets import OFFICIAL, REGISTRY, where

    rows = [
        {"name": name, "title": entry.title, "found": str(where(name) or ""), "download": name in OFFICIAL}
        for name, entry in sorted(REGISTRY.items())
    ]
    if as_json:
        print(json.dumps({"datasets": rows}))
        return
    table = Table(title="Data sets")
    for column in ("name", "what it is", "state"):
        table.add_column(column, no_wrap=column == "name")
    for row in rows:
        state = f"found in {row['found']}" if row["found"] else "can be fetched" if row["download"] else "not found"
        table.add_row(str(row["name"]), str(row["title"]), state)
    Console().print(table)


@app.command()
def info(name: Name, as_json: AsJson = False) -> None:
    """Describe a data set: source, terms, citation, arrays and checksums.

    Example: `fisherfold datasets info movielens1m`
    """
    from fisherfold.datasets import OFFICIAL, record, where

    entry, official = record(name), OFFICIAL.get(name)
    facts = {
        "name": name, "title": entry.title, "source": entry.source, "terms": entry.licence, "cite": entry.citation,
        "found in": str(where(name) or "nowhere yet"),
        "download": f"{official.url} (about {official.megabytes:g} MB)" if official else "not offered",
        "arrays": {key: f"{a.dtype} {a.shape} sha256 {a.sha256}" for key, a in entry.arrays.items()},
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(show_header=False)
    for key, value in facts.items():
        text = "\n".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(key, text)
    Console().print(table)


@app.command()
def fetch(
    name: Name,
    source: Annotated[
        Path | None, typer.Option("--from", help="Read an official file that is already here instead of downloading.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept the terms without being asked.")] = False,
) -> None:
    """Fetch a data set from its official address, verify it and keep it in the cache. The terms are shown first.

    Example: `fisherfold datasets fetch movielens1m`
    """
    from fisherfold.datasets import fetch as get
    from fisherfold.datasets import record, where

    entry = record(name)
    if source is None and where(name) is None and not yes:
        Console(stderr=True).print(f"{entry.title}\nterms: {entry.licence}\ncite:  {entry.citation}", markup=False)
        typer.confirm("Download it under these terms?", abort=True, err=True)
    console = Console(stderr=True)
    with console.status(f"fetching {name}"):
        folder = get(name, source=source, say=lambda text: console.print(text, markup=False, highlight=False))
    print(folder)


@app.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="Names; all that are found if none.")] = None,
) -> None:
    """Compare the arrays of data sets with their recorded checksums. Example: `fisherfold datasets verify school`."""
    from rich.progress import track

    from fisherfold.datasets import REGISTRY, where
    from fisherfold.datasets import verify as check

    chosen = names or [name for name in sorted(REGISTRY) if where(name) is not None]
    if not chosen:
        raise typer.BadParameter("no data set is found; set FISHERFOLD_DATA, or see 'fisherfold datasets list'")
    for name in track(chosen, description="verifying", console=Console(stderr=True), transient=True):
        check(name)
        print(f"{name}: ok")
