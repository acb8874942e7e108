"""Every example runs, says something, draws a picture, and has its place in the gallery."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
NAMES = sorted(file.stem for file in FOLDER.glob("[!_]*.py")) if FOLDER.is_dir() else []
pytestmark = pytest.mark.skipif(not NAMES, reason="the examples are not part of an installed package")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_a_person_would_run_it(name, tmp_path):
    import fisherfold

    picture = tmp_path / f"{name}.png"
    home = str(Path(fisherfold.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / f"{name}.py"), str(picture)], capture_output=True, text=True,
        cwd=tmp_path, env={"PYTHONPATH": home, "PATH": "", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir() if file.suffix] == [picture.name]


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("gallery", FOLDER / "_gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_shows_every_example_as_it_is(gallery):
    assert sorted(gallery.ORDER) == NAMES
    page = FOLDER.parent / "docs" / "gallery.md"
    assert page.read_text(encoding="utf-8") == gallery.page(), "run 'make gallery'"
    for name in NAMES:
        picture = page.parent / "img" / "gallery" / f"{name}.png"
        assert 5_000 < picture.stat().st_size < 120_000
