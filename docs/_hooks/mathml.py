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
    text = BLOCK.sub(lambda m: f'<div style="overflow-x:auto">{convert(m[1], display="block")}</div>', text)
    return INLINE.sub(lambda m: convert(m[1]), text)
