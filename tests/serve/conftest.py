"""A service over a small model, asked in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the service is an extra")
testclient = pytest.importorskip("starlette.testclient", exc_type=RuntimeError)

from served import fitted  # noqa: E402

from fisherfold.serve.app import create_app  # noqa: E402
from fisherfold.serve.settings import Settings  # noqa: E402


@pytest.fixture(scope="session")
def model():
    return fitted()


@pytest.fixture
def folder(model, tmp_path):
    model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def client_of(tmp_path):
    """Make a client of a service over a folder; the services end with the test."""
    clients = []

    def make(folder, *, token=None, **options):
        scratch = tmp_path / f"scratch{len(clients)}"
        scratch.mkdir()
        settings = Settings(str(folder), str(scratch), **options)
        app = create_app(settings, token=token)
        client = testclient.TestClient(app, raise_server_exceptions=False)
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(client_of, folder):
    return client_of(folder)
