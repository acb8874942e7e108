"""One progress display on standard error, for fits and commands that take longer than two seconds.

    with track("fitting", at_most=50) as line:
        line.update(3, {"loss": 0.1})

It appears in terminals and notebooks only, never in worker processes, and is gone when the block
ends. A block inside another adds a line to the same display. ``show(False)`` or the environment
variable ``FISHERFOLD_PROGRESS=0`` switches it off, ``show(True)`` shows it in every process,
``show(None)`` is how it starts.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Line", "show", "track"]

# seconds before anything is shown, and between two pictures
PATIENCE = 2.0
_PAUSE = 0.2
_COUNTS = frozenset(
    {"iteration", "round", "seconds", "samples", "products"}
)  # not worth the room in a line
_asked: bool | None = None
_display: _Display | None = None


def show(on: bool | None) -> None:
    """Switch the display on, off, or (None) on where somebody can see it.

    Args:
        on: whether to show it.
    """
    global _asked
    _asked = on


@contextlib.contextmanager
def track(
    what: str, total: float | None = None, *, at_most: int | None = None, verbose: bool = False
) -> Iterator[Line]:
    """Show a line while a block runs.

    Args:
        what: what is done, such as ``fitting``.
        total: how many steps there are; a bar and the time left are shown if given.
        at_most: the most steps there can be, where the block may end before.
        verbose: print every record that the line is given, whether or not there is a display.

    Yields:
        The line, to be told what is done.
    """
    global _display
    line = Line(what, total, at_most, verbose)
    opened = None
    seen = threading.current_thread() is threading.main_thread()
    if seen and _display is None and _visible():
        _display = opened = _Display()
    display = _display if seen else None
    if display is not None:
        display.lines.append(line)
    try:
        yield line
    finally:
        if display is not None:
            display.lines.remove(line)
        if opened is not None:
            _display = None
            opened.close()


class Line:
    """What a block has done so far."""

    def __init__(self, what: str, total: float | None, at_most: int | None, verbose: bool) -> None:
        self.what = what
        self.total = total
        self.at_most = at_most
        self.verbose = verbose
        self.began = time.monotonic()
        self.done = 0.0
        self.record: Mapping[str, Any] = {}
        self._first: tuple[float, float] | None = None

    def update(
        self,
        done: float | None = None,
        record: Mapping[str, Any] | None = None,
        *,
        what: str | None = None,
        total: float | None = None,
    ) -> None:
        """Say how much is done, and figures of it."""
        self.what = what or self.what
        self.total = total or self.total
        if done is not None:
            self._first = self._first or (time.monotonic(), done)
            self.done = done
        if record is not None:
            self.record = record
            if self.verbose:
                print(
                    "  ".join(f"{name} {value:.6g}" for name, value in record.items()),
                    file=sys.stderr,
                )

    def advance(self) -> None:
        """One step more is done."""
        self.update(self.done + 1)

    def text(self) -> str:
        """The counts, the time and the figures."""
        now = time.monotonic()
        parts = []
        if self.total is not None:
            parts.append(f"{self.done:,.0f} of {self.total:,.0f}")
        elif self.done:
            parts.append(
                f"{self.done:,.0f}" + (f" of at most {self.at_most:,}" if self.at_most else "")
            )
        parts.append(_clock(now - self.began))
        if self.total is not None and self._first is not None and self.done > self._first[1]:
            pace = (now - self._first[0]) / (self.done - self._first[1])
            parts.append(f"{_clock(pace * max(0.0, self.total - self.done))} left")
        parts += [
            f"{name} {value:.4g}" for name, value in self.record.items() if name not in _COUNTS
        ]
        return "  ".join(parts)


class _Display:
    """A thread that waits, and then draws the lines until it is closed."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fisherfold-progress")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        if self._over.wait(PATIENCE):
            return
        with contextlib.suppress(OSError), _notebook() if _in_notebook() else _terminal() as draw:
            draw(self.lines)
            while not self._over.wait(_PAUSE):
                draw(self.lines)


def _visible() -> bool:
    if _asked is not None:
        return _asked
    if os.environ.get("FISHERFOLD_PROGRESS") == "0" or "PYTEST_CURRENT_TEST" in os.environ:
        return False
    if multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return False
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def _terminal() -> Iterator[Callable[[list[Line]], None]]:
    from rich.console import Console
    from rich.live import Live

    # what is printed meanwhile goes above the lines, unless it goes into a file
    live = Live(
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
    )
    with live:
        yield lambda lines: live.update(_drawn(lines), refresh=True)


@contextlib.contextmanager
def _notebook() -> Iterator[Callable[[list[Line]], None]]:
    from IPython.display import display
    from rich.console import Console

    def text(lines: list[Line]) -> dict[str, str]:
        console = Console(file=io.StringIO(), width=100, force_jupyter=False)
        with console.capture() as captured:
            console.print(_drawn(lines))
        return {"text/plain": captured.get().rstrip()}

    handle: Any = display(text([]), raw=True, display_id=True)  # type: ignore[no-untyped-call]
    try:
        yield lambda lines: handle.update(text(lines), raw=True)
    finally:
        handle.update({"text/plain": ""}, raw=True)


def _drawn(lines: list[Line]) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    now = list(lines)  # the other thread goes on
    shown = [each for each in now[:-1] if each.total] + now[-1:]
    table = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, None, 1):  # in a narrow terminal figures give way
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
    for line in shown:
        bar = "" if line.total is None else ProgressBar(line.total, line.done, width=16)
        table.add_row(Text(line.what), bar, Text(line.text()))
    return table


def _clock(seconds: float) -> str:
    """Seconds as a clock shows them: 0:09 or 1:02:05."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
