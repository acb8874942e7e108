"""Formulas become MathML when the pages are built: browsers draw it, and no other host is asked."""

import re

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

FENCE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"(?<![\\$])\$([^$\n]+?)\$(?!\d)")


class Formulas(Preprocessor):
    """Replaces $...$ and $$...$$ outside of code."""

    def run(self, lines):
        """Return the lines of a page with MathML for its formulas."""
        pieces = FENCE.split("\n".join(lines))
        text = "".join(p if i % 2 else self.replaced(p) for i, p in enumerate(pieces))
        return text.split("\n")

    def replaced(self, text):
        """Return text outside of code with MathML for its formulas."""
        style = "overflow-x:auto;overflow-y:hidden;padding:.4em 0"
        text = BLOCK.sub(
            lambda m: self.kept(f'<div style="{style}">{convert(m[1], display="block")}</div>'),
            text,
        )
        return INLINE.sub(lambda m: self.kept(f"<span>{convert(m[1])}</span>"), text)

    def kept(self, html):
        """Put HTML aside, so that Markdown leaves it alone."""
        return self.md.htmlStash.store(html)


class MathML(Extension):
    """The extension of Python-Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Run before fenced code is taken out."""
        md.preprocessors.register(Formulas(md), "mathml", 30)


def makeExtension(**given):
    """What Markdown looks for."""
    return MathML(**given)
