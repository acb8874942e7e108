"""``fisherfold serve``: the HTTP service over a saved model."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fisherfold.cli.voice import Voice, option, typed
from fisherfold.extras import need

LIMITS = "Limits"
# The variable that holds the token.
TOKEN = "FISHERFOLD_TOKEN"  # noqa: S105


@dataclass
class Listening:
    """Where the service listens, and with how many processes."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 is all of the machine's.")
    port: int = option(8000, "Port to listen at; 0 takes a free one.", min=0, max=65535)
    workers: int = option(1, "Number of processes, which share the model's memory.", min=1, max=256)


@dataclass
class Limits:
    """What a request may take."""

    body_limit: int = option(1 << 20, "Largest request body in bytes.", min=1024, panel=LIMITS)
    queue_limit: int = option(
        64, "Requests of a worker at a time; more get 429.", min=1, panel=LIMITS
    )
    time_limit: float = option(
        10.0, "Seconds for an answer; later ones get 503.", min=0.01, max=3600, panel=LIMITS
    )


def serve(
    voice: Voice,
    model: Annotated[Path, typer.Argument(help="Model folder of 'complete fit'.")],
    listening: Listening,
    limits: Limits,
    titles: Annotated[
        Path | None,
        typer.Option("--titles", help="CSV of column ids and titles, for the page."),
    ] = None,
    *,
    allow_updates: Annotated[
        bool, typer.Option("--allow-updates", help="Offer /update; needs a single worker.")
    ] = False,
    reload_seconds: Annotated[
        float,
        typer.Option("--reload-seconds", help="Seconds between looks at the folder.", min=0.05),
    ] = 2.0,
    log_ids: Annotated[
        bool, typer.Option("--log-ids", help="Name the ids of requests in the log.")
    ] = False,
) -> None:
    """Answer over HTTP from a saved model: predictions, lists, reasons, and a page to try them.

    The folder is followed: a new model takes the place of the old one without a lost request. A
    token in the variable FISHERFOLD_TOKEN is asked of every caller.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package)
    if allow_updates and listening.workers > 1:
        raise ValueError("--allow-updates needs a single worker: updates follow each other")
    from fisherfold.serve.run import serve as run
    from fisherfold.serve.settings import Settings

    if not os.environ.get(TOKEN) and not _is_loopback(listening.host):
        voice.remark(
            f"warning: everybody who reaches {listening.host} can ask this service and see its "
            f"ids: set the variable {TOKEN}, or listen at 127.0.0.1"
        )
    settings = Settings(
        model=str(model.absolute()),
        titles=None if titles is None else str(titles.absolute()),
        updates=allow_updates,
        reload_seconds=reload_seconds,
        body_limit=limits.body_limit,
        queue_limit=limits.queue_limit,
        time_limit=limits.time_limit,
        log_ids=log_ids,
    )

    def ready(address: str, version: str) -> None:
        facts = {"address": address, "version": version, "workers": listening.workers}
        voice.answer(facts, f"serving {typed(model)} (version {version}) at {address}")

    run(
        settings,
        host=listening.host,
        port=listening.port,
        workers=listening.workers,
        ready=ready,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
