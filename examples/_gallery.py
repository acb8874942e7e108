"""Run every example, keep its picture in docs/img/gallery, and write docs/gallery.md.

    make gallery

The page is put together from the docstrings, so that an example says what it shows in one place.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
import textwrap
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
ORDER = (
    "natural_gradient",
    "standard_errors",
    "factor_loadings",
    "ratings",
    "impute",
    "choose_rank",
    "many_regressions",
    "rotation",
    "rotation_averaging",
    "ica",
    "directions",
    "train_digits",
    "scale_invariance",
    "read_the_trace",
)
HEAD = """# Gallery

Short programs, each with one picture; below it are the lines that use fisherfold, and the file
that has the rest. All of them run in CI, on synthetic data or on tables of scikit-learn, in a few
seconds each. `make gallery` makes the pictures and this page.
"""
LINES = 10
METHODS = {"covariance", "fold_in", "interval", "predict", "recommend", "report"}


def page() -> str:
    """The text of the page."""
    return "\n".join([HEAD, *map(_entry, ORDER)])


def _entry(name: str) -> str:
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, command, *text = docstring.split("\n\n")
    shown = "\n\n".join(text).replace("``", "`")
    return (
        f"## {title.rstrip('.')}\n\n![{name.replace('_', ' ')}](img/gallery/{name}.png)\n\n{shown}"
        f"\n\n`{command.strip()}`:\n\n```py\n{_excerpt(source)}\n```\n"
    )


def _excerpt(source: str) -> str:
    """The statements that use fisherfold."""
    tree = ast.parse(source)
    lines = source.splitlines()
    imports = [node for node in tree.body if "fisherfold" in (getattr(node, "module", None) or "")]
    names = {alias.name for node in imports for alias in node.names} | {"fisherfold"}
    chosen: list[str] = [lines[node.lineno - 1] for node in imports]
    for node in sorted(
        (n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.Expr)), key=lambda n: n.lineno
    ):
        used = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        called = {n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute)}
        block = lines[node.lineno - 1 : node.end_lineno]
        if (used & names or called & METHODS) and len(chosen) + len(block) <= LINES + 2:
            chosen += textwrap.dedent("\n".join(block)).splitlines()
    return "\n".join(chosen)


def draw(name: str, target: Path) -> None:
    """Run an example and keep its picture with at most 64 colours."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    buffer = io.BytesIO()
    module.main().savefig(buffer, format="png", dpi=100)
    with Image.open(buffer) as image:
        small = image.convert("RGB").quantize(
            64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
        small.save(target, format="PNG", optimize=True)


def main() -> None:
    """Run all examples, or those that are named."""
    folder = ROOT / "docs" / "img" / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or ORDER:
        print(f"== {name}")
        draw(name, folder / f"{name}.png")
    (ROOT / "docs" / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
