"""Small models of films and people, and what starts a service over them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import contextmanager

import numpy as np
import polars as pl

from fisherfold.completion import ImplicitCompletion, ItemToItem, MatrixCompletion


def ratings(seed: int = 0) -> pl.DataFrame:
    """Stars that 60 people give to 40 films, with two tastes."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 40))
    person, film = np.nonzero(rng.random(taste.shape) < 0.4)
    stars = np.clip(np.round(3 + taste[person, film]), 1, 5)
    films = [f"f{each}" for each in film]
    return pl.DataFrame({"person": person, "film": films, "stars": stars})


def fitted(kind: str = "ratings", seed: int = 0):
    frame = ratings(seed)
    if kind == "ratings":
        return MatrixCompletion(2, random_state=seed).fit(frame)
    if kind == "point":
        return MatrixCompletion(2, inference="point", random_state=seed).fit(frame)
    pairs = frame.filter(pl.col("stars") > 3).select("person", "film")
    model = ImplicitCompletion(2, validation=0) if kind == "implicit" else ItemToItem(validation=0)
    return model.fit(pairs)


class Process:
    """``fisherfold serve`` on a free port of the loopback."""

    def __init__(self, folder, *words, token=None):
        environment = os.environ | ({"FISHERFOLD_TOKEN": token} if token else {})
        command = [sys.executable, "-m", "fisherfold", "serve", str(folder), "--port", "0"]
        self.token = token
        # a file: a pipe that nobody reads would fill, and stop the service
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, "--json", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.stop()[1])
        self.address = json.loads(line)["address"]

    def ask(self, path, body=None, *, timeout=60):
        """Status and content of an answer."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.address + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, text.decode() if path == "metrics" else json.loads(text)

    def stop(self):
        """End it by SIGTERM; gives the exit code and the log."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        self.log.seek(0)
        with self.log:
            return self.process.returncode, self.log.read()


@contextmanager
def service(folder, *words, token=None):
    found = Process(folder, *words, token=token)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.stop()
