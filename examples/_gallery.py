"""Make the gallery: run every example, keep its picture in docs/img/gallery, and write docs/gallery.md.

    make gallery

The page is put together from the docstrings, so that an example says what it shows in one place.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
ORDER = (
    "natural_gradient", "standard_errors", "ratings", "impute", "choose_rank", "many_regressions", "rotation",
    "rotation_averaging", "ica", "directions", "train_digits", "scale_invariance", "read_the_trace",
)  # fmt: skip
HEAD = """# Gallery

Short programs, each with one picture. All of them run in CI, on synthetic data or on tables that come with
scikit-learn; none takes more than a few seconds. `make gallery` makes the pictures and this page.
"""


def page() -> str:
    """The text of the page."""
    return "\n".join([HEAD, *map(_entry, ORDER)])


def _entry(name: str) -> str:
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, command, *text = docstring.split("\n\n")
    body = source.split('"""\n', 1)[1].strip()
    return (
        f"## {title.rstrip('.')}\n\n![{title}](img/gallery/{name}.png)\n\n" + "\n\n".join(text).replace("``", "`")
        + f"\n\n<details markdown=\"1\"><summary><code>{command.strip()}</code></summary>\n\n"
        f"```py\n{body}\n```\n\n</details>\n"
    )


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
        small = image.convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
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
