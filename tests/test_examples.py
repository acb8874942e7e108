"""Every example runs, says something, draws a picture, and has its place in the gallery.

They run in this process, which has loaded torch already; one runs as a person would run it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NAMES = sorted(file.stem for file in FOLDER.glob("[!_]*.py")) if FOLDER.is_dir() else []
pytestmark = pytest.mark.skipif(
    not NAMES, reason="the examples are not part of an installed package"
)


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_says_something_and_draws(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    figure = load(name).main()
    assert capsys.readouterr().out.strip()
    assert figure.axes
    figure.savefig(tmp_path / "picture.png", dpi=50)
    assert [file.name for file in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.slow
def test_an_example_runs_as_a_person_would_run_it(tmp_path):
    import fisherfold

    picture, home = tmp_path / "picture.png", str(Path(fisherfold.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / "natural_gradient.py"), str(picture)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": home},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_gallery_shows_every_example_as_it_is():
    gallery = load("_gallery")
    assert sorted(gallery.ORDER) == NAMES
    page = FOLDER.parent / "docs" / "gallery.md"
    assert page.read_text(encoding="utf-8") == gallery.page(), "run 'make gallery'"
    for name in NAMES:
        picture = page.parent / "img" / "gallery" / f"{name}.png"
        assert 5_000 < picture.stat().st_size < 120_000
