"""The report page: sections in, one HTML file out that needs nothing else.

Style, script, data and pictures are inside the file; no other host is asked for anything. All text passes through
``html.escape``; the curves travel as JSON in which every ``<`` is written as an escape, so that no string can end the
script element. The same sections give the same bytes.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from fisherfold._version import __version__
from fisherfold.files import make_folder, write_atomically
from fisherfold.plain import finite
from fisherfold.reproduce.sections import Cell, Chart, Section, Table

# colour alone never carries a verdict: the words stand beside it
_CLASSES = {"holds": "good", "holds partly": "fair", "does not hold": "bad"}


def write_page(
    sections: Sequence[Section],
    folder: str | os.PathLike[str],
    *,
    title: str,
    lead: str,
    rules: Sequence[str] = (),
) -> Path:
    """Write the page.

    Args:
        sections: what it shows, in order.
        folder: where; pictures of the sections are read below it.
        title: its title.
        lead: a sentence below the title.
        rules: how the verdicts are computed, a sentence each.

    Returns:
        The file, ``index.html``.
    """
    make_folder(Path(folder))
    target = Path(folder) / "index.html"
    text = page(sections, Path(folder), title=title, lead=lead, rules=rules)
    write_atomically(target, text.encode(errors="replace"))  # the name of a folder in a command need not be text
    return target


def page(
    sections: Sequence[Section], folder: Path, *, title: str, lead: str, rules: Sequence[str] = ()
) -> str:
    """The text of the page.

    Args:
        sections: what it shows, in order.
        folder: pictures of the sections are read below it.
        title: its title.
        lead: a sentence below the title.
        rules: how the verdicts are computed, a sentence each.

    Returns:
        HTML.
    """
    charts = {f"{s.name}-{i}": asdict(chart) for s in sections for i, chart in enumerate(s.charts)}
    body = "\n".join(_section(section, folder) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
</head>
<body>
<header>
<div><h1>{_text(title)}</h1><p>{_text(lead)}</p></div>
<button type="button" id="theme" aria-label="switch between light and dark">light / dark</button>
</header>
<main>
{_overview(sections, rules)}
{body}
</main>
<footer><p>Written by fisherfold {_text(__version__)}.</p></footer>
<script type="application/json" id="charts">{_json(charts)}</script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _overview(sections: Sequence[Section], rules: Sequence[str]) -> str:
    if len(sections) < 2:
        return ""
    rows = "".join(
        f'<tr><td><a href="#{_text(s.name)}">{_text(s.title)}</a></td><td>{_badge(s)}</td>'
        f"<td>{_text(s.claim)}</td></tr>"
        for s in sections
    )
    head = '<tr><th scope="col">experiment</th><th scope="col">verdict</th><th scope="col">the paper says</th></tr>'
    return (
        '<section id="overview"><h2>Overview</h2><div class="scroll"><table class="overview" aria-label="Overview">'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>{_rules(rules)}</section>"
    )


def _rules(rules: Sequence[str]) -> str:
    if not rules:
        return ""
    items = "".join(f"<li>{_text(rule)}</li>" for rule in rules)
    return f"<details><summary>Terms, and how the verdicts are computed</summary><ul>{items}</ul></details>"


def _badge(section: Section) -> str:
    kind = _CLASSES.get(section.verdict, "none")
    return f'<span class="verdict {kind}">{_text(section.verdict)}</span>'


def _section(section: Section, folder: Path) -> str:
    badge = "" if section.verdict == "no claim" else _badge(section)
    parts = [f"<h2>{_text(section.title)} {badge}</h2>", f'<p class="claim">{_text(section.claim)}</p>']
    if section.why:
        reasons = "".join(f"<li>{_text(reason)}</li>" for reason in section.why)
        parts.append(f'<ul class="why">{reasons}</ul>')
    charts = "".join(
        f"<figure>{_caption(chart)}"
        f'<div class="chart" data-chart="{_text(section.name)}-{i}">'
        "<noscript>The curves need JavaScript; the picture below does not.</noscript></div></figure>"
        for i, chart in enumerate(section.charts)
    )
    if charts:
        parts.append(f'<div class="charts">{charts}</div>')
    parts.append(_picture(section, folder))
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
    return f'<section id="{_text(section.name)}">\n' + "\n".join(filter(None, parts)) + "\n</section>"


def _caption(chart: Chart) -> str:
    """The title of a chart, unless its only error says the same already."""
    return "" if chart.title in chart.metrics.values() else f"<figcaption>{_text(chart.title)}</figcaption>"


def _picture(section: Section, folder: Path) -> str:
    file = folder / section.picture
    if not section.picture or not file.is_file():
        return ""
    content, (width, height) = _small_png(file.read_bytes())
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    image = f'<img alt="{_text(section.title)}" width="{width}" height="{height}" src="{source}">'
    if not section.charts:
        return f'<div class="scroll picture">{image}</div>'
    return f'<details><summary>The figure as a picture</summary><div class="scroll picture">{image}</div></details>'


def _small_png(content: bytes) -> tuple[bytes, tuple[int, int]]:
    """The picture with at most 256 colours, a third of its size or less, and its width and height."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        # the palette that covers most keeps the thin coloured lines, which a median cut gives to the greys
        small = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    out = io.BytesIO()
    small.save(out, format="PNG", optimize=True)
    return min(out.getvalue(), content, key=len), small.size


def _table(table: Table, *, folded: bool) -> str:
    numeric = [all(not isinstance(cell, str) for cell in column) for column in zip(*table.rows, strict=True)]
    head = "".join(
        f'<th scope="col" class="{"number" if right else "short"}" aria-sort="none">'
        f'<button type="button">{_text(column)}</button></th>'
        for column, right in zip(table.columns, numeric, strict=True)
    )
    cells = ("".join(map(_cell, row, numeric)) for row in table.rows)
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    inside = (
        f'<div class="scroll"><table class="sortable" aria-label="{_text(table.title)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if folded:
        return f"<details><summary>{_text(table.title)}</summary>{inside}</details>"
    return f"<h3>{_text(table.title)}</h3>{inside}"


def _cell(cell: Cell, right: bool) -> str:
    cell = finite(cell)
    key = f' data-value="{cell!r}"' if isinstance(cell, (int, float)) else ""
    kind = "number" if right else "long" if isinstance(cell, str) and len(cell) > 40 else "short"
    return f'<td class="{kind}"{key}>{_text(_plain(cell))}</td>'


def _plain(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _json(content: object) -> str:
    text = json.dumps(finite(content), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)


def _asset(name: str) -> str:
    folder = resources.files("fisherfold.reproduce").joinpath("report_assets")
    return folder.joinpath(name).read_text(encoding="utf-8")
