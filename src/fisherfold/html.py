"""HTML of a page that is one file: no script, no request to another host, and all text escaped."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence


def text(value: object) -> str:
    """Escape what is shown."""
    return html.escape(str(value), quote=True)


def image(png: bytes) -> str:
    """Put a picture into its address."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def table(columns: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]], *, label: str = "") -> str:
    """Make a table that scrolls sideways.

    ``columns``: the heads, as text. ``kinds``: the class of each column. ``rows``: cells as HTML.
    """
    head = "".join(f'<th scope="col" class="{kind}">{text(c)}</th>' for c, kind in zip(columns, kinds, strict=True))
    lines = ("".join(f'<td class="{k}">{cell}</td>' for cell, k in zip(row, kinds, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    named = f' aria-label="{text(label)}"' * bool(label)
    return f'<div class="scroll"><table{named}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def document(title: str, style: str, body: str) -> str:
    """Make the whole page."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
