"""Formulas become MathML when the pages are built: browsers draw it by themselves, and no other host is asked."""

import re

from latex2mathml.converter import convert

FENCE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"(?<![\\$])\$([^$\n]+?)\$(?!\d)")


def on_page_markdown(markdown, **_):
    """Replace $...$ and $$...$$ outside of code."""
    pieces = FENCE.split(markdown)
    return "".join(piece if index % 2 else formulas(piece) for index, piece in enumerate(pieces))


def formulas(text):
    """The text with its formulas as MathML."""
    style = "overflow-x:auto;overflow-y:hidden;padding:.4em 0"
    text = BLOCK.sub(lambda m: f'<div style="{style}">{convert(m[1], display="block")}</div>', text)
    # inside a span, since Markdown takes a line that begins with <math> for a block of its own
    return INLINE.sub(lambda m: f"<span>{convert(m[1])}</span>", text)
