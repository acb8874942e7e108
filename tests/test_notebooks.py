"""Every notebook runs from its first cell to its last, in its own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = "imputation"  # the one that runs in the default tests


@pytest.mark.skipif(not NOTEBOOKS, reason="the notebooks are not part of an installed package")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "path",
    [p if p.stem == QUICK else pytest.param(p, marks=pytest.mark.slow) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "notebooks are kept without outputs"
    )
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
