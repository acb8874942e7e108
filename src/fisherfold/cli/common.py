"""One voice for every command: its shared options, its help, its warnings and its interrupts.

A command is a function whose first argument is a ``Voice``, attached with ``command``::

    @command(app, examples=["fisherfold train resnet20 --epochs 10"])
    def train(voice: Voice, model: Annotated[str, typer.Argument(help="Which network.")]) -> None:
        \"\"\"What it does, in one sentence.\"\"\"
        with voice.progress("training") as bar:
            ...                                   # bar.say("epoch 3"), bar.tick(3, 10)
        voice.result("Trained", {"accuracy": 0.9})

That gives it ``--json``, ``--quiet``, ``--verbose``, ``--debug``, examples in its help and the exit codes

    0    done
    1    declined by the user, or an error that is not the user's
    2    an option, a file or data that cannot be used
    130  interrupted; ``voice.resume`` says how to go on; 143 and 129 by SIGTERM and SIGHUP

Results go to standard output, everything else to standard error. ``tests/cli/test_voice.py`` walks over all commands.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from fisherfold.cli.signals import exit_code
from fisherfold.cli.voice import Voice
from fisherfold.cli.words import printable

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks, only the result.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Report every step, and the time and memory used.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the full trace of an error.")]
_SHARED = {"as_json": AsJson, "quiet": Quiet, "verbose": Verbose, "debug": Debug}


def group(text: str, *, examples: Sequence[str]) -> typer.Typer:
    """A family of commands.

    Args:
        text: its help.
        examples: whole command lines, shown in its help.

    Returns:
        The application to attach commands to.
    """
    return typer.Typer(
        help=text, epilog=_epilog(examples), no_args_is_help=True, rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )  # fmt: skip


def _epilog(examples: Sequence[str]) -> str:
    lines = "\n\n".join(f"`{example}`" for example in examples)
    return f"Example{'s' if len(examples) > 1 else ''}:\n\n{lines}"


def command(
    app: typer.Typer, name: str | None = None, *, examples: Sequence[str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Attach a function as a command that speaks with the shared voice.

    Args:
        app: the family.
        name: its name, that of the function if not given.
        examples: whole command lines, shown in its help.

    Returns:
        A decorator; the function's first argument is the ``Voice``.
    """

    def attach(run: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
        shared = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
            for key, kind in _SHARED.items()
        ]

        @functools.wraps(run)
        def inside(**given: Any) -> None:
            voice = Voice(**{key: given.pop(key) for key in _SHARED})
            began = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.showwarning = _warn  # type: ignore[assignment]
                    _load_torch(voice)
                    run(voice, **given)
            except KeyboardInterrupt as stop:
                Console(stderr=True).print(f"stopped; {voice.resume}", markup=False, highlight=False, soft_wrap=True)
                raise typer.Exit(exit_code(stop)) from None
            voice.detail(f"took {time.perf_counter() - began:.1f} s{_memory()}")

        # typer reads the options off the signature
        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        inside.__signature__ = inspect.Signature([*keywords, *shared])  # type: ignore[attr-defined]
        inside.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        app.command(name, epilog=_epilog(examples))(inside)
        return run

    return attach


def _warn(message: Warning | str, *_: Any) -> None:
    """Say a warning of the library without the file and the line of code that Python would show."""
    Console(stderr=True).print(f"warning: {printable(str(message))}", markup=False, highlight=False, soft_wrap=True)


def _load_torch(voice: Voice) -> None:
    """Load what takes seconds on a cold machine while a line says so."""
    if voice.shows_progress and "torch" not in sys.modules:
        with Console(stderr=True).status("loading torch"):
            import torch  # noqa: F401


def _memory() -> str:
    """The largest memory of the process so far, where the system tells it."""
    try:
        import resource
    except ImportError:
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f", {peak * (1 if sys.platform == 'darwin' else 1024) / 1e6:.0f} MB at most"
