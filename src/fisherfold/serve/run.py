"""Start the server: one process, or several that share the model and the port."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.supervisors import Multiprocess

from fisherfold.serve.settings import Settings

FACTORY = "fisherfold.serve.app:from_environment"
# Connections that wait to be accepted.
BACKLOG = 2048


def serve(
    settings: Settings,
    *,
    host: str,
    port: int,
    workers: int,
    ready: Callable[[str, str], None],
) -> None:
    """Answer requests until SIGTERM or an interrupt; what is under way then is finished.

    Args:
        settings: what the service is told; its scratch folder is made here.
        host: the address to listen at.
        port: the port; 0 takes a free one.
        workers: the number of processes.
        ready: is called with the address and the model's version before requests are taken.

    Raises:
        ValueError: if the model cannot be loaded.
        OSError: if the address cannot be taken or the folder cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="fisherfold-serve-") as scratch:
        settings = replace(settings, scratch=scratch)
        version = _prepare(settings)
        if workers > 1:
            counts = Path(scratch) / "metrics"
            counts.mkdir()
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(counts)
        settings.to_environment()
        # a signal is how a service ends
        with _listen(host, port) as listener, suppress(KeyboardInterrupt):
            ready(_address(host, listener), version)
            _run(settings, listener, workers)


def _prepare(settings: Settings) -> str:
    """Check model and titles, and write the arrays that the workers map."""
    from fisherfold.serve.store import ModelStore
    from fisherfold.serve.titles import Titles

    Titles.read(settings.titles)
    return ModelStore(Path(settings.model), Path(settings.scratch)).current.name


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise OSError(
            f"cannot listen at {host}, port {port}: {getattr(error, 'strerror', None) or error}; "
            "name another --host or --port"
        ) from None
    # inherited by connections; asyncio sets it only where it knows the protocol, and an answer
    # would else wait 40 ms for the caller's acknowledgement of its first part
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.set_inheritable(True)
    return listener


def _address(host: str, listener: socket.socket) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}/"


def _run(settings: Settings, listener: socket.socket, workers: int) -> None:
    options: dict[str, Any] = {
        "factory": True,
        "workers": workers,
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "timeout_graceful_shutdown": max(1, round(settings.time_limit)),
    }
    from fisherfold.serve.limits import log_as_json

    log_as_json()
    config = uvicorn.Config(FACTORY, **options)
    if workers > 1:
        Multiprocess(config, sockets=[listener]).run()
    else:
        uvicorn.Server(config).run(sockets=[listener])
