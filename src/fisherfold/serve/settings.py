"""What the service is told, in one object that reaches its workers through the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

# Holds the settings as JSON for the worker processes; the token has a variable of its own.
SETTINGS = "FISHERFOLD_SERVE"
TOKEN = "FISHERFOLD_TOKEN"  # noqa: S105


@dataclass(frozen=True)
class Settings:
    """The settings of a service.

    Attributes:
        model: the folder of the model.
        scratch: a folder for what workers share, removed when the service ends.
        titles: a CSV file of column ids and titles for the page, or None.
        updates: whether ``/update`` is offered, which needs a single worker.
        reload_seconds: between looks at the model folder.
        body_limit: bytes of a request body.
        queue_limit: requests of one worker that wait or run; more get 429.
        time_limit: seconds for the answer to a request.
        log_ids: whether log lines name the ids of requests.
    """

    model: str
    scratch: str = ""
    titles: str | None = None
    updates: bool = False
    reload_seconds: float = 2.0
    body_limit: int = 1 << 20
    queue_limit: int = 64
    time_limit: float = 10.0
    log_ids: bool = False

    def to_environment(self) -> None:
        """Leave the settings for the processes that this one starts."""
        os.environ[SETTINGS] = json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings that the parent process left."""
        return cls(**json.loads(os.environ[SETTINGS]))
