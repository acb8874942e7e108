"""The progress display: what is drawn, where, and that it leaves nothing behind."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from rich.console import Console

from fisherfold import MatrixCompletion, MatrixCompletionCV, progress
from fisherfold.progress import Line, track


@pytest.fixture
def seen(monkeypatch):
    """Displays are on and appear at once; the sets of lines that were drawn."""
    drawn, own = [], progress._drawn

    def draw(lines):
        drawn.append([(line.what, line.total) for line in lines])
        return own(lines)

    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.001)
    monkeypatch.setattr(progress, "_drawn", draw)
    progress.show(True)
    yield drawn
    progress.show(None)


def in_a_terminal(body: str, then: str = "") -> str:
    """What a terminal gets to see of a program with two seconds shortened."""
    program = textwrap.dedent(f"""
        import os, sys, time
        from fisherfold import progress
        progress.PATIENCE = progress._PAUSE = 0.05
        {body}
    """)
    main, side = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=side,
        stdout=side,
        stderr=side,
        close_fds=True,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        | {"TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(side)
    shown = b""
    while True:
        try:
            part = os.read(main, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    child.wait()
    return shown.decode()


def test_a_line_tells_counts_time_and_figures(monkeypatch):
    clock = iter([100.0, 100.0, 110.0, 120.0, 120.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    line = Line("downloading", 8, None, False)
    line.update(0)
    line.update(2, {"loss": 0.123456, "seconds": 3.0})
    assert line.text() == "2 of 8  0:10  0:30 left  loss 0.1235"
    fit = Line("fitting", None, 50, False)
    fit.done, fit.began = 3, 50.0
    assert fit.text() == "3 of at most 50  1:10"


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_terminal_cuts_figures_and_keeps_counts(width, seen):
    lines = [Line("cross-validation", 9, None, False), Line("fitting", None, 50, False)]
    lines[0].done, lines[1].record = 4, {f"figure {k}": k / 7 for k in range(20)}
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(progress._drawn(lines))
    shown = captured.get().splitlines()
    assert [len(line) <= width for line in shown] == [True, True]
    assert shown[0].startswith("cross-validation ━")
    assert "4 of 9" in shown[0]
    assert shown[1].rstrip().endswith("…")


def test_a_terminal_sees_lines_that_are_gone_at_the_end_and_prints_above_them():
    shown = in_a_terminal(
        """
        with progress.track('fitting', at_most=9) as line:
            line.update(3, {'loss': 0.5}); time.sleep(0.4); print('a word'); time.sleep(0.2)
        print('done')
    """.strip()
    )
    assert "3 of at most 9" in shown
    assert "loss 0.5" in shown
    assert "a word\r\n" in shown
    assert re.search(r"\x1b\[2K.*done\r\n$", shown, re.DOTALL)  # the line was erased before


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_errors_and_interrupts_clear_it(error):
    shown = in_a_terminal(
        f"""
        try:
            with progress.track('outer', 2), progress.track('inner'):
                time.sleep(0.4); raise {error}
        except {error}:
            print('caught', progress._display)
    """.strip()
    )
    assert "inner" in shown
    assert re.search(r"\x1b\[2K.*caught None\r\n$", shown, re.DOTALL)


@pytest.mark.parametrize(
    "body",
    [
        "with progress.track('x'): pass",  # over before anybody waits
        "progress.show(False)\n        with progress.track('x'): time.sleep(0.3)",
        "os.environ['FISHERFOLD_PROGRESS'] = '0'\n        with progress.track('x'): time.sleep(0.3)",
        "os.environ['RANK'] = '1'\n        with progress.track('x'): time.sleep(0.3)",
        "sys.stderr = open(os.devnull, 'w')\n        with progress.track('x'): time.sleep(0.3)",
    ],
)
def test_nothing_is_shown_where_nobody_looks_or_it_is_off(body):
    assert in_a_terminal(body) == ""


def test_a_search_and_its_fits_share_a_display(seen):
    table = np.random.default_rng(0).normal(size=(30, 20))
    table[::3, ::2] = np.nan
    MatrixCompletionCV(ranks=(1, 2), max_iter=20).fit(table)
    assert progress._display is None
    assert any([line[0] for line in lines] == ["cross-validation", "fitting"] for lines in seen)
    assert ("cross-validation", 6) in seen[-1] + [line for lines in seen for line in lines]
    assert not any(thread.name == "fisherfold-progress" for thread in threading.enumerate())


def test_other_threads_show_nothing(seen):
    thread = threading.Thread(
        target=lambda: MatrixCompletion(rank=1).fit([(0, 0), (1, 1)], [1.0, 2.0])
    )
    thread.start()
    thread.join()
    assert seen == []


def test_a_record_is_printed_if_asked_for(capsys):
    with track("fitting", verbose=True) as line:
        line.update(1, {"iteration": 1, "bound": -1.23456789})
    assert capsys.readouterr().err == "iteration 1  bound -1.23457\n"


def test_rich_is_not_imported_before_something_is_drawn():
    program = "import sys, fisherfold.progress as p\nwith p.track('x'): pass\nassert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_notebook_shows_it_and_clears_it():
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    cell = nbformat.v4.new_code_cell(
        "import os, time\nos.environ.pop('PYTEST_CURRENT_TEST', None)\n"
        "from fisherfold import progress\nprogress.PATIENCE = 0.05\n"
        "with progress.track('fitting', 4) as line:\n    line.update(2); time.sleep(0.5)\n"
        "    shown = progress._display is not None\nshown"
    )
    run = client.NotebookClient(
        nbformat.v4.new_notebook(cells=[cell]), kernel_name="python3", timeout=60
    )
    texts, keep = [], run.process_message

    def process(message, *rest):
        texts.append(str(message["content"].get("data", "")))
        return keep(message, *rest)

    run.process_message = process
    outputs = run.execute()["cells"][0]["outputs"]
    assert any("fitting" in text and "2 of 4" in text for text in texts)
    assert [o["data"]["text/plain"] for o in outputs] == ["", "True"]
