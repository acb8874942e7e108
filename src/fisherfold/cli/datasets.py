"""``fisherfold datasets``: what is there, where it comes from, and how to get it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fisherfold.cli.common import command, group
from fisherfold.cli.voice import Voice, grid
from fisherfold.progress import track

app = group(
    "The named data sets: list, describe, fetch and verify them.",
    examples=["fisherfold datasets list", "fisherfold datasets fetch movielens1m"],
)


def _names(incomplete: str) -> list[str]:
    from fisherfold.datasets import REGISTRY

    return [name for name in sorted(REGISTRY) if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(help="The name of the data set, as in the list.", autocompletion=_names)
]


@command(app, "list", examples=["fisherfold datasets list"])
def list_sets(voice: Voice) -> None:
    """List the data sets and where each of them is."""
    from fisherfold.datasets import REGISTRY, where

    rows = [
        {
            "name": name,
            "title": entry.title,
            "found": str(where(name) or ""),
            "download": bool(entry.url),
        }
        for name, entry in sorted(REGISTRY.items())
    ]
    lines = []
    for row in rows:
        state = "can be fetched" if row["download"] else f"by hand: datasets info {row['name']}"
        lines.append(
            (row["name"], row["title"], f"found in {row['found']}" if row["found"] else state)
        )
    caption = "fetch one with: fisherfold datasets fetch NAME"
    table = grid("Data sets", ("name", "what it is", "state"), lines, text=3, caption=caption)
    voice.answer({"datasets": rows}, table)


@command(app, examples=["fisherfold datasets info movielens1m"])
def info(voice: Voice, name: Name) -> None:
    """Describe a data set: source, terms, citation, arrays and checksums."""
    from fisherfold.datasets import record, where

    entry = record(name)
    facts = {
        "name": name,
        "title": entry.title,
        "source": entry.source,
        "terms": entry.licence,
        "cite": entry.citation,
        "found in": str(where(name) or "nowhere yet"),
        "download": f"{entry.url} (about {entry.megabytes:g} MB)" if entry.url else "not offered",
        "arrays": {
            key: f"{a.dtype} {a.shape} sha256 {a.sha256}" for key, a in entry.arrays.items()
        },
    }
    voice.result(name, facts)


@command(
    app,
    examples=[
        "fisherfold datasets fetch movielens1m",
        "fisherfold datasets fetch movielens1m --from ml-1m.zip --yes",
    ],
)
def fetch(
    voice: Voice,
    name: Name,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Read an official file that is already here instead of downloading."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Accept the terms without being asked.")
    ] = False,
) -> None:
    """Fetch a data set, verify it and keep it in the cache. The terms are shown first."""
    from fisherfold.datasets import fetch as get
    from fisherfold.datasets import record, where

    entry = record(name)
    there = where(name)
    if source is None and there is None and entry.url and not yes:
        _ask(f"{entry.title}\nterms: {entry.licence}\ncite:  {entry.citation}", entry.megabytes)
    folder = get(name, source=source, say=voice.remark)
    facts = {"name": name, "folder": folder, "was there": source is None and there is not None}
    voice.answer(facts, str(folder))


def _ask(terms: str, megabytes: float) -> None:
    """Show the terms, whatever else is shown or not, and go on only after a yes."""
    print(terms, file=sys.stderr)
    # typer.confirm(err=True) prints a blank to standard output, which is the result's
    print(
        f"Download it (about {megabytes:g} MB) under these terms? [y/N]: ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    try:
        answer = input()
    except EOFError:
        raise typer.Abort from None
    if answer.strip().lower() not in {"y", "yes"}:
        print("nothing was downloaded", file=sys.stderr)
        raise typer.Exit(1)


@command(app, examples=["fisherfold datasets verify", "fisherfold datasets verify school jester1"])
def verify(
    voice: Voice,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names; all that are found if none.", autocompletion=_names),
    ] = None,
) -> None:
    """Compare the arrays of data sets with their recorded checksums."""
    from fisherfold.datasets import REGISTRY, where
    from fisherfold.datasets import verify as check

    chosen = names or [name for name in sorted(REGISTRY) if where(name) is not None]
    if not chosen:
        raise FileNotFoundError(
            "no data set is found; set FISHERFOLD_DATA, or see 'fisherfold datasets list'"
        )
    wrong = []
    with track("verifying", len(chosen)) as line:
        for name in chosen:
            line.update(what=f"verifying {name}")
            try:
                check(name)
            except (ValueError, FileNotFoundError) as error:
                wrong.append(str(error))
            line.advance()
    if wrong:
        counted = (
            f"{len(wrong)} of {len(chosen)} data sets cannot be used, the others are as recorded: "
        )
        advice = "; remove a file that is damaged, and fetch or copy it again"
        raise ValueError(f"{counted if len(chosen) > 1 else ''}{'; '.join(wrong)}{advice}")
    voice.answer({"verified": chosen}, *(f"{name}: ok" for name in chosen))
