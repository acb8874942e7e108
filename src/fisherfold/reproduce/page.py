"""The report page: sections of plain numbers and strings in, one self-contained HTML file out.

Style and pictures are inside the file, there is no script and no request to another host, and all text is escaped. A
section is kept as JSON beside its results, so that the page can be made again from what was run before.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import finite

Verdict = Literal["holds", "holds partly", "does not hold", "no claim", "not run", "data not found"]
TITLE = "Riemannian natural gradient methods, reproduced"
LEAD = (
    "Each experiment and theorem of the paper run again: its claim, our figures over several seeds, and a verdict that "
    "is computed from the recorded numbers."
)
# colour alone never carries a verdict: the words stand beside it
_CLASSES = {"holds": "good", "holds partly": "fair", "does not hold": "bad"}


@dataclass(frozen=True)
class Table:
    """A table: its caption, the column heads, and a cell per column in each row; numbers stay numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Section:
    """One experiment on the page: the paper's claim, the verdict with its reasons, tables, picture and command."""

    name: str
    title: str
    claim: str
    verdict: Verdict
    why: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    tables: Sequence[Table] = ()
    picture: str = ""
    notes: Sequence[str] = ()
    files: Sequence[str] = ()

    def save(self, path: Path) -> None:
        """Write the section as JSON."""
        make_folder(path.parent)
        write_atomically(path, json.dumps(finite(asdict(self)), allow_nan=False).encode())

    @classmethod
    def load(cls, path: Path) -> Section:
        """Read what ``save`` wrote."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**content, "tables": tuple(Table(**table) for table in content["tables"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a section of a report ({error}); delete it and run again") from None


def write_page(sections: Sequence[Section], folder: Path, rules: Sequence[str]) -> Path:
    """Write ``index.html``; pictures of the sections are read below the folder."""
    make_folder(folder)
    target = folder / "index.html"
    write_atomically(target, _page(sections, folder, rules).encode(errors="replace"))
    return target


def _page(sections: Sequence[Section], folder: Path, rules: Sequence[str]) -> str:
    style = resources.files("fisherfold.reproduce").joinpath("page.css").read_text(encoding="utf-8")
    overview = "".join(
        f'<tr><td><a href="#{_text(s.name)}">{_text(s.title)}</a></td><td>{_badge(s)}</td>'
        f"<td>{_text(s.claim)}</td></tr>"
        for s in sections
    )
    terms = "".join(f"<li>{_text(rule)}</li>" for rule in rules)
    body = "\n".join(_section(section, folder) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{TITLE}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header><h1>{TITLE}</h1><p>{LEAD}</p></header>
<main>
<section id="overview"><h2>Overview</h2><div class="scroll"><table class="overview" aria-label="Overview"><thead>
<tr><th scope="col">experiment</th><th scope="col">verdict</th><th scope="col">the paper says</th></tr></thead>
<tbody>{overview}</tbody></table></div>
<details><summary>Terms, and how the verdicts are computed</summary><ul>{terms}</ul></details></section>
{body}
</main>
<footer><p>Written by fisherfold {_text(__version__)}.</p></footer>
</body>
</html>
"""


def _badge(section: Section) -> str:
    return f'<span class="verdict {_CLASSES.get(section.verdict, "none")}">{_text(section.verdict)}</span>'


def _section(section: Section, folder: Path) -> str:
    parts = [f"<h2>{_text(section.title)} {_badge(section)}</h2>", f'<p class="claim">{_text(section.claim)}</p>']
    if section.why:
        parts.append(f'<ul class="why">{"".join(f"<li>{_text(reason)}</li>" for reason in section.why)}</ul>')
    file = folder / section.picture
    if section.picture and file.is_file():
        source = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
        parts.append(f'<div class="scroll picture"><img alt="{_text(section.title)}" src="{source}"></div>')
    parts += [_table(table, folded=i > 0) for i, table in enumerate(section.tables) if table.rows]
    parts += [f'<p class="note">{_text(note)}</p>' for note in section.notes]
    if section.settings:
        pairs = "".join(f"<dt>{_text(k)}</dt><dd>{_text(_plain(v))}</dd>" for k, v in section.settings.items())
        parts.append(f"<details><summary>Settings</summary><dl>{pairs}</dl></details>")
    if section.files:
        links = ", ".join(f'<a href="{_text(quote(file))}">{_text(file)}</a>' for file in section.files)
        parts.append(f'<p class="files">Raw tables: {links}</p>')
    if section.command:
        verb = "To run it" if section.verdict in {"not run", "data not found"} else "To repeat it"
        parts.append(f'<p class="command">{verb}: <code>{_text(section.command)}</code></p>')
    return f'<section id="{_text(section.name)}">\n' + "\n".join(parts) + "\n</section>"


def _table(table: Table, *, folded: bool) -> str:
    numeric = [all(not isinstance(cell, str) for cell in column) for column in zip(*table.rows, strict=True)]
    head = "".join(
        f'<th scope="col" class="{"number" if right else "short"}">{_text(column)}</th>'
        for column, right in zip(table.columns, numeric, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in table.rows)
    inside = (
        f'<div class="scroll"><table aria-label="{_text(table.title)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if folded:
        return f"<details><summary>{_text(table.title)}</summary>{inside}</details>"
    return f"<h3>{_text(table.title)}</h3>{inside}"


def _cell(cell: Any, right: bool) -> str:
    kind = "number" if right else "long" if isinstance(cell, str) and len(cell) > 40 else "short"
    return f'<td class="{kind}">{_text(_plain(finite(cell)))}</td>'


def _plain(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)
