"""The progress display: iterations, loss, gradient norm, ρ, σ and the time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from fisherfold.solvers.state import State


class Display:
    """A progress bar on standard error that shows the last row of the trace; silent unless asked for."""

    def __init__(self, method: str, total: int, *, visible: bool, console: Console | None = None) -> None:
        # in a narrow terminal the bar gives way, not the figures
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console or Console(stderr=True),
            disable=not visible,
        )
        self.task = self.progress.add_task(method, total=total, figures="")

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.progress.disable:  # rich before 14.3 ends a line that it has not begun
            self.progress.stop()

    def show(self, state: State) -> None:
        """Draw the state."""
        self.progress.update(self.task, completed=state.iteration, figures=figures(state))


def figures(state: State) -> str:
    """The figures of the last iteration in one line."""
    parts = [f"loss {state.loss:.4e}", f"‖g‖ {state.gradient_norm:.1e}"]
    if "rho" in state.record:
        parts.append(f"ρ {state.record['rho']:.2f}")
    if "sigma" in state.record:
        parts.append(f"σ {state.record['sigma']:.0e}")
    return "  ".join(parts)
