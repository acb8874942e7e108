"""The report page: sections of plain numbers and strings in, one self-contained HTML file out.

Style and pictures are inside the file, there is no script and no request to another host, and all
text is escaped. A section is kept as JSON beside its results, so that the page can be made again
from what was run before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.html import Html, document, image, text
from fisherfold.html import table as html_table
from fisherfold.plain import finite

Verdict = Literal["holds", "holds partly", "does not hold", "not run", "data not found"]
TITLE = "Riemannian natural gradient methods, reproduced"
LEAD = (
    "Each experiment and theorem of the paper run again: its claim, our figures over several "
    "seeds, and a verdict that is computed from the recorded numbers."
)
# colour alone never carries a verdict: the words stand beside it
_CLASSES = {"holds": "good", "holds partly": "fair", "does not hold": "bad"}


@dataclass(frozen=True)
class Table:
    """A table: its caption, the column heads, and a cell per column in each row.

    Numbers stay numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Section:
    """One experiment on the page.

    The paper's claim, the verdict with its reasons, tables, picture and command.
    """

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

    def save(self, path: Path) -> None:
        """Write the section as JSON."""
        make_folder(path.parent)
        write_atomically(path, json.dumps(finite(asdict(self)), allow_nan=False).encode())

    @classmethod
    def load(cls, path: Path) -> Section | None:
        """Read what ``save`` wrote; None if it is not there, or damaged."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_bytes())
            return cls(**{**content, "tables": [Table(**table) for table in content["tables"]]})
        return None


def write_page(sections: Sequence[Section], folder: Path, rules: Sequence[str]) -> Path:
    """Write ``index.html``; pictures of the sections are read below the folder."""
    make_folder(folder)
    target = folder / "index.html"
    rows = [
        (Html(f'<a href="#{text(s.name)}">{text(s.title)}</a>'), _badge(s), s.claim)
        for s in sections
    ]
    overview = html_table(["experiment", "verdict", "the paper says"], rows, label="Overview")
    terms = "".join(f"<li>{text(rule)}</li>" for rule in rules)
    body = "\n".join(_section(section, folder) for section in sections)
    page = f"""<header><h1>{TITLE}</h1><p>{LEAD}</p></header>
<main>
<section class="overview"><h2>Overview</h2>{overview}
<details><summary>Terms, and how the verdicts are computed</summary>
<ul>{terms}</ul></details></section>
{body}
</main>
<footer><p>Written by fisherfold {text(__version__)}.</p></footer>"""
    write_atomically(target, document(TITLE, page).encode(errors="replace"))
    return target


def _badge(section: Section) -> Html:
    kind = _CLASSES.get(section.verdict, "none")
    return Html(f'<span class="verdict {kind}">{text(section.verdict)}</span>')


def _section(section: Section, folder: Path) -> str:
    parts = [
        f"<h2>{text(section.title)} {_badge(section)}</h2>",
        f'<p class="claim">{text(section.claim)}</p>',
    ]
    parts.append(f"<ul>{''.join(f'<li>{text(reason)}</li>' for reason in section.why)}</ul>")
    if section.picture:
        source = image((folder / section.picture).read_bytes())
        parts.append(
            f'<div class="scroll picture"><img alt="{text(section.title)}" src="{source}"></div>'
        )
    for place, table in enumerate(table for table in section.tables if table.rows):
        inside = html_table(table.columns, table.rows, label=table.title)
        folded = f"<details><summary>{text(table.title)}</summary>{inside}</details>"
        parts.append(folded if place else f"<h3>{text(table.title)}</h3>{inside}")
    parts += [f'<p class="note">{text(note)}</p>' for note in section.notes]
    pairs = "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in section.settings.items())
    if pairs:
        parts.append(f"<details><summary>Settings</summary><dl>{pairs}</dl></details>")
    parts.append(f'<p class="command">To run it: <code>{text(section.command)}</code></p>')
    return f'<section id="{text(section.name)}">\n' + "\n".join(parts) + "\n</section>"
