"""HTML of a page that is one file: no script, no request to another host, and all text escaped."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from importlib import resources


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> str:
    """What is shown of a value, escaped: a number with four digits, nothing as a dash."""
    if isinstance(value, Html):
        return value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value))
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value), quote=True)


def image(png: bytes) -> str:
    """Put a picture into its address."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, label: str) -> str:
    """Make a table that scrolls sideways; a column without text is one of numbers."""
    rows = list(rows)
    kinds = [
        "long" if any(len(cell) > 40 for cell in texts) else "short" if texts else "number"
        for texts in (
            [cell for cell in column if isinstance(cell, str)] for column in zip(*rows, strict=True)
        )
    ]
    head = "".join(
        f'<th scope="col" class="{kind}">{text(c)}</th>'
        for c, kind in zip(columns, kinds, strict=True)
    )
    lines = (
        "".join(f'<td class="{k}">{text(cell)}</td>' for cell, k in zip(row, kinds, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    start = f'<div class="scroll"><table aria-label="{text(label)}">'
    return f"{start}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def document(title: str, body: str, style: str = "") -> str:
    """Make the whole page, light or dark as the reader has it."""
    shared = resources.files("fisherfold").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<link rel="icon" href="data:,">
<style>
{shared}{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
