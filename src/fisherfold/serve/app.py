"""The endpoints: JSON in, a call of the model in a thread, JSON out.

A request takes the model that answers once, so that an answer is of one version, whose name it carries. What the
library raises about ids, values and options becomes 422 with its sentence; the service lives on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, multiprocess
from prometheus_client import REGISTRY as OWN_REGISTRY
from starlette.exceptions import HTTPException

from fisherfold._version import __version__
from fisherfold.serve import schemas as s
from fisherfold.serve.limits import MODEL, RELOADS, Gate, log_as_json, refuse
from fisherfold.serve.settings import TOKEN, Settings
from fisherfold.serve.store import ModelStore, Version
from fisherfold.serve.titles import Titles

HERE = Path(__file__).parent
PATHS = frozenset(
    "/ /page.js /page.css /health /ready /metrics /model /search /predict /recommend /recommend_new /similar /explain "
    "/update /docs /openapi.json".split()
)
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": s.Problem, "description": text}
    for code, text in {
        401: "The token is missing or wrong.",
        413: "The body is too long.",
        422: "The request cannot be answered; the sentence says why.",
        429: "Too many requests are under way.",
        503: "The answer took too long.",
    }.items()
}

logger = logging.getLogger("fisherfold.serve")


class Service:
    """The state of one worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = ModelStore(Path(settings.model), Path(settings.scratch))
        self.titles = Titles.read(settings.titles)
        # one thread computes at a time: a request is short, and PyTorch's threads would only wait for each other
        self.threads = anyio.CapacityLimiter(1)
        self.updating = threading.Lock()
        self._show_version()

    async def compute(self, call: Callable[[], Any]) -> Any:
        """Run a call of the model in a thread; its warnings are dropped, since answers say what they mean."""

        def quietly() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return call()

        try:
            with anyio.fail_after(self.settings.time_limit):
                return await anyio.to_thread.run_sync(
                    quietly, abandon_on_cancel=True, limiter=self.threads
                )
        except TimeoutError:
            limit = self.settings.time_limit
            raise HTTPException(
                503, f"the answer takes longer than {limit:g} s: ask for less at a time"
            ) from None

    async def follow(self) -> None:
        """Look at the model folder every so often, for as long as the service runs."""
        while True:
            await asyncio.sleep(self.settings.reload_seconds)
            refused = self.store.refused
            if await anyio.to_thread.run_sync(self.store.refresh):
                RELOADS.labels("taken").inc()
                self._show_version()
                fields = {"version": self.store.current.name}
                logger.info("took a new version of the model", extra={"fields": fields})
            elif self.store.refused and self.store.refused != refused:
                RELOADS.labels("refused").inc()
                logger.error(
                    f"refused a new version of the model, the old one stays: {self.store.refused}"
                )

    def _show_version(self) -> None:
        MODEL.clear()
        MODEL.labels(self.store.current.name).set(1)


def from_environment() -> FastAPI:
    """The application of a worker process, as its parent has set it up."""
    torch.set_num_threads(1)
    log_as_json()
    return create_app(Settings.from_environment(), token=os.environ.get(TOKEN) or None)


def create_app(settings: Settings, *, token: str | None = None) -> FastAPI:
    """The application.

    Args:
        settings: what it is told.
        token: what callers must show, or None.

    Returns:
        An ASGI application.
    """
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(service.follow())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(
        title="fisherfold",
        version=__version__,
        summary="Predictions, recommendations and reasons of a completed matrix.",
        lifespan=lifespan,
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.service = service
    app.add_middleware(
        Gate,
        paths=PATHS,
        token=token,
        body_limit=settings.body_limit,
        queue_limit=settings.queue_limit,
    )
    _add_errors(app)
    _add_life(app, service)
    _add_questions(app, service)
    if settings.updates:
        _add_updates(app, service)
    _add_page(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return refuse(400, f"the body is not JSON: {first['ctx']['error']}")
        place = ".".join(str(part) for part in first["loc"][1:]) or "the body"
        return refuse(422, f"{place}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def stopped(request: Request, error: HTTPException) -> JSONResponse:
        return refuse(error.status_code, str(error.detail), **dict(error.headers or {}))

    async def impossible(request: Request, error: Exception) -> JSONResponse:
        return refuse(422, " ".join(str(error).split()))

    # what the library raises about what it was given
    for kind in (ValueError, TypeError, OverflowError):
        app.add_exception_handler(kind, impossible)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        logger.error("unexpected error", exc_info=error)
        return refuse(500, "an unexpected error, which the log of the service describes")


def _add_life(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether there is a model to answer with, its version, and why a newer one was refused."""
        return {
            "status": "ok",
            "version": service.store.current.name,
            "refused": service.store.refused,
        }

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counts and times in Prometheus's text format, of all workers together."""
        registry = OWN_REGISTRY
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/model")
    async def describe() -> dict[str, Any]:
        """What the model knows."""
        version = service.store.current
        model = version.model
        return {
            "version": version.name,
            "class": type(model).__name__,
            "rows": len(model.row_ids_),
            "columns": len(model.column_ids_),
            "names": list(model.names_),
            "low": float(model.model_.low),
            "high": float(model.model_.high),
            "rates": type(model).__name__ != "ImplicitCompletion",
            "updates": service.settings.updates,
        }


def _add_questions(app: FastAPI, service: Service) -> None:
    def log(request: Request, **fields: Any) -> None:
        if service.settings.log_ids:
            request.state.log = fields

    @app.post("/predict")
    async def predict(asked: s.Predict, request: Request) -> s.Predictions:
        """Predict pairs, with intervals if a coverage is given."""
        log(request, ids=[pair.row for pair in asked.pairs])
        version = service.store.current
        pairs = [(pair.row, pair.column) for pair in asked.pairs]
        values, low, high = await service.compute(
            lambda: _predicted(version.model, pairs, asked.coverage)
        )
        found = [
            s.Prediction(row=row, column=column, prediction=v, low=a, high=b)
            for (row, column), v, a, b in zip(pairs, values, low, high, strict=True)
        ]
        return s.Predictions(predictions=found, version=version.name)

    @app.post("/recommend")
    async def recommend(asked: s.Recommend, request: Request) -> s.Table:
        """The columns with the largest predictions for rows of the fit."""
        log(request, ids=asked.ids)
        version = service.store.current
        frame = await service.compute(lambda: version.model.recommend(asked.ids, **_choice(asked)))
        return service_table(service, version, frame)

    @app.post("/recommend_new")
    async def recommend_new(asked: s.RecommendNew) -> s.Table:
        """The columns with the largest predictions for a new row, with intervals."""
        version = service.store.current
        frame = await service.compute(lambda: _for_new(version.model, asked))
        return service_table(service, version, frame)

    @app.post("/similar")
    async def similar(asked: s.Similar, request: Request) -> s.Table:
        """Columns (or rows) whose predicted values go together."""
        log(request, ids=asked.ids)
        version = service.store.current
        frame = await service.compute(
            lambda: version.model.similar(asked.ids, asked.k, of=asked.of)
        )
        return service_table(service, version, frame)

    @app.post("/explain")
    async def explain(asked: s.Explain, request: Request) -> s.Table:
        """The ratings that moved a prediction most, with their shares."""
        log(request, ids=[asked.row])
        version = service.store.current
        if (asked.row is None) == (asked.ratings is None):
            raise ValueError("give either a row of the fit or ratings of a new one")
        who = asked.row if asked.ratings is None else _values(asked.ratings)
        frame = await service.compute(lambda: version.model.explain(who, asked.column, asked.k))
        return service_table(service, version, frame)


def _add_updates(app: FastAPI, service: Service) -> None:
    @app.post("/update")
    async def update(asked: s.Update) -> dict[str, Any]:
        """Take new ratings into the model; an event with a key that was taken already changes nothing."""
        events = [(e.row, e.column, e.value, e.key) for e in asked.events]

        def take() -> Version:
            with service.updating:
                return service.store.update(events)

        version = await service.compute(take)
        service._show_version()
        return {"events": len(events), "version": version.name}


def _add_page(app: FastAPI, service: Service) -> None:
    @app.get("/search")
    async def search(q: str = "", k: int = 12) -> dict[str, Any]:
        """Columns whose title or id contains the words that are asked for."""
        model = service.store.current.model
        found = service.titles.search(q[:200], min(max(k, 1), 50), model)
        return {"found": [{"id": column, "title": title} for column, title in found]}

    for name in ("page.html", "page.js", "page.css"):
        path = "/" if name == "page.html" else f"/{name}"
        app.add_api_route(
            path,
            lambda name=name: FileResponse(HERE / name, headers={"Cache-Control": "no-cache"}),
            include_in_schema=False,
            methods=["GET"],
        )


def service_table(service: Service, version: Version, frame: Any) -> s.Table:
    """A data frame as rows of JSON, with titles where there are some."""
    columns = {str(name): _plain(frame[name]) for name in frame.columns}
    titled = service.titles.of(version.model, columns)
    if titled is not None:
        columns["title"] = titled
    names = list(columns)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return s.Table(rows=rows, version=version.name)


def _plain(series: Any) -> list[Any]:
    """A column as Python values; what is not a finite number is null in JSON."""
    values = series.to_list() if hasattr(series, "to_list") else list(series)
    return [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]


def _choice(asked: s.Choice) -> dict[str, Any]:
    return {
        "k": asked.k,
        "candidates": asked.candidates,
        "exclude": asked.exclude or None,
        "exclude_seen": asked.exclude_seen,
        "by": asked.by,
        "seed": asked.seed,
    }


def _values(ratings: list[s.Rating]) -> dict[Any, float]:
    return {rating.column: rating.value for rating in ratings}


def _predicted(model: Any, pairs: list[Any], coverage: float | None) -> tuple[Any, Any, Any]:
    values = [float(v) for v in model.predict(pairs)]
    if coverage is None:
        empty = [None] * len(pairs)
        return [_or_null(v) for v in values], empty, empty
    low, high = model.predict_interval(pairs, coverage)
    return ([_or_null(float(v)) for v in part] for part in (values, low, high))  # type: ignore[return-value]


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _for_new(model: Any, asked: s.RecommendNew) -> Any:
    """The list of a new row, with an interval for each place where the model has intervals."""
    values = _values(asked.ratings)
    options = _choice(asked)
    if asked.features:
        options["features"] = asked.features
    return model.recommend_new(values, **options)
