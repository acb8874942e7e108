"""The endpoints: JSON in, a call of the model in a thread, JSON out.

A request takes the model that answers once, so that an answer is of one version, whose name it
carries. What the library raises about ids, values and options becomes 422 with its sentence, what
it warns of becomes part of the answer; the service lives on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, multiprocess
from prometheus_client import REGISTRY as OWN_REGISTRY
from prometheus_client.core import GaugeMetricFamily
from starlette.exceptions import HTTPException

from fisherfold._version import __version__
from fisherfold.serve import schemas as s
from fisherfold.serve.limits import OPEN, RELOADS, Gate, log_as_json, refuse
from fisherfold.serve.settings import TOKEN, Settings
from fisherfold.serve.store import Event, ModelStore, Version
from fisherfold.serve.titles import Titles
from fisherfold.tables.frames import columns_of
from fisherfold.warn import collected

HERE = Path(__file__).parent
PATHS = frozenset(
    [
        *OPEN,
        "/metrics",
        "/model",
        "/search",
        "/predict",
        "/recommend",
        "/recommend_new",
        "/similar",
        "/explain",
        "/update",
    ]
)
# What the page may load: only what this service sends.
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": s.Problem, "description": text}
    for code, text in {
        400: "The body is not JSON.",
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
        # one thread computes: a request is short, and several would wait for each other; updates
        # take long, and have a thread of their own
        self.computing = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.changing = ThreadPoolExecutor(1, thread_name_prefix="change")

    async def compute(self, call: Callable[[], dict[str, Any]]) -> Response:
        """Answer with what a call returns, and with its warnings; after the time limit with 503."""
        loop = asyncio.get_running_loop()
        waiting = loop.run_in_executor(self.computing, _as_json, call)
        try:
            content = await asyncio.wait_for(waiting, self.settings.time_limit)
        except asyncio.TimeoutError:
            limit = self.settings.time_limit
            raise HTTPException(
                503, f"the answer takes longer than {limit:g} s: ask for less at a time"
            ) from None
        return Response(content, media_type="application/json")

    async def change(self, call: Callable[[], Any]) -> Any:
        """Run a call that may exchange the model, one at a time and to its end."""
        return await asyncio.get_running_loop().run_in_executor(self.changing, call)

    async def follow(self) -> None:
        """Look at the model folder every so often, for as long as the service runs."""
        while True:
            await asyncio.sleep(self.settings.reload_seconds)
            try:
                await self._look()
            except Exception:  # whatever is in the folder, the old model answers
                logger.exception("cannot follow the model folder")

    async def _look(self) -> None:
        refused = self.store.refused
        if await self.change(self.store.refresh):
            RELOADS.labels("taken").inc()
            fields = {"version": self.store.current.name}
            logger.info("took a new version of the model", extra={"fields": fields})
        elif self.store.refused and self.store.refused != refused:
            RELOADS.labels("refused").inc()
            logger.error(
                f"refused a new version of the model, the old one stays: {self.store.refused}"
            )

    def table(self, version: Version, frame: Any, of: str = "columns") -> dict[str, Any]:
        """A data frame as rows of JSON."""
        return self.rows(version, columns_of_answer(frame), of)

    def rows(
        self, version: Version, columns: dict[str, list[Any]], of: str = "columns"
    ) -> dict[str, Any]:
        """Columns as rows of JSON, with titles where there are some."""
        titles = self.titles.of(version.model, columns) if of == "columns" else None
        if titles is not None:
            columns = columns | {"title": titles}
        names = list(columns)
        rows = [
            dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)
        ]
        return {"rows": rows, "version": version.name}

    def close(self) -> None:
        """Let the threads go."""
        self.computing.shutdown(wait=False, cancel_futures=True)
        self.changing.shutdown(wait=True)


def _as_json(call: Callable[[], dict[str, Any]]) -> bytes:
    with collected() as warned:
        answer = call()
    return json.dumps(answer | {"warnings": warned}, allow_nan=False).encode()


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
        service.close()

    app = FastAPI(
        title="fisherfold",
        version=__version__,
        summary="Predictions, recommendations and reasons of a completed matrix.",
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts of another host
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
        time_limit=settings.time_limit,
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
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        own = CollectorRegistry()
        own.register(ModelInfo(service.store.current))
        text = generate_latest(registry) + generate_latest(own)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

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
            "rates": hasattr(model, "predict_interval"),
            "intervals": _has_intervals(model),
            "updates": service.settings.updates,
        }


class ModelInfo:
    """The metric that names the model's version."""

    def __init__(self, version: Version) -> None:
        self.version = version

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Give the metric, as Prometheus's client asks for it."""
        text = "1 for the version of the model that answers."
        family = GaugeMetricFamily("fisherfold_model_info", text, labels=["version"])
        family.add_metric([self.version.name], 1)
        yield family


def _add_questions(app: FastAPI, service: Service) -> None:
    def log(request: Request, ids: list[Any]) -> None:
        if service.settings.log_ids:
            request.state.log = {"ids": ids}

    @app.post("/predict", response_model=s.Predictions)
    async def predict(asked: s.Predict, request: Request) -> Response:
        """Predict pairs, with intervals if a coverage is given."""
        log(request, [[pair.row, pair.column] for pair in asked.pairs])
        version = service.store.current
        return await service.compute(
            lambda: {"predictions": _predicted(version.model, asked), "version": version.name}
        )

    @app.post("/recommend", response_model=s.Table)
    async def recommend(asked: s.Recommend, request: Request) -> Response:
        """The columns with the largest predictions for rows of the fit."""
        log(request, asked.ids)
        version = service.store.current
        return await service.compute(
            lambda: service.table(version, version.model.recommend(asked.ids, **_choice(asked)))
        )

    @app.post("/recommend_new", response_model=s.Table)
    async def recommend_new(asked: s.RecommendNew, request: Request) -> Response:
        """The columns with the largest predictions for a new row, with intervals."""
        log(request, [rating.column for rating in asked.ratings])
        version = service.store.current
        return await service.compute(lambda: _for_new(service, version, asked))

    @app.post("/similar", response_model=s.Table)
    async def similar(asked: s.Similar, request: Request) -> Response:
        """Columns (or rows) whose predicted values go together."""
        log(request, asked.ids)
        version = service.store.current
        return await service.compute(
            lambda: service.table(
                version, version.model.similar(asked.ids, asked.k, of=asked.of), asked.of
            )
        )

    @app.post("/explain", response_model=s.Table)
    async def explain(asked: s.Explain, request: Request) -> Response:
        """The ratings that moved a prediction most, with their shares."""
        log(request, [asked.row, asked.column])
        version = service.store.current
        if (asked.row is None) == (asked.ratings is None):
            raise ValueError("give either a row of the fit or ratings of a new one")
        return await service.compute(lambda: service.table(version, _explained(version, asked)))


def _add_updates(app: FastAPI, service: Service) -> None:
    @app.post("/update", response_model=s.Updated)
    async def update(asked: s.Update) -> dict[str, Any]:
        """Take new ratings into the model; an event whose key was taken already is left out."""
        events = [Event(e.row, e.column, e.value, e.key) for e in asked.events]

        def take() -> tuple[Version, list[str]]:
            with collected() as warned:
                return service.store.update(events), warned

        version, warned = await service.change(take)
        return {"events": len(events), "version": version.name, "warnings": warned}


def _add_page(app: FastAPI, service: Service) -> None:
    @app.get("/search", response_model=s.Found)
    async def search(q: str = "", k: int = 12) -> Response:
        """Columns whose title or id contains the words that are asked for."""
        model = service.store.current.model

        def find() -> dict[str, Any]:
            found = service.titles.search(q[:200], min(max(k, 1), 50), model)
            return {"found": [{"id": column, "title": title} for column, title in found]}

        return await service.compute(find)

    for path, name in (("/", "page.html"), ("/page.js", "page.js"), ("/page.css", "page.css")):
        app.add_api_route(path, _file(HERE / name), include_in_schema=False, methods=["GET"])


def _file(path: Path) -> Callable[[], FileResponse]:
    return lambda: FileResponse(path, headers=PAGE_HEADERS)


def columns_of_answer(frame: Any) -> dict[str, list[Any]]:
    """A data frame of any library as lists of Python values; what is not finite is null in JSON."""
    found = columns_of(frame)
    return {str(name): [_plain(v) for v in np.asarray(found[name]).tolist()] for name in found}


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _choice(asked: s.Choice) -> dict[str, Any]:
    options = {
        "k": asked.k,
        "candidates": asked.candidates,
        "exclude_seen": asked.exclude_seen,
        "by": asked.by,
        "seed": asked.seed,
    }
    return options | ({"exclude": asked.exclude} if asked.exclude else {})


def _values(ratings: list[s.Rating]) -> dict[Any, float]:
    found = {rating.column: rating.value for rating in ratings}
    if len({str(column) for column in found}) < len(ratings):
        raise ValueError("a column is rated twice: give one value for each")
    return found


def _has_intervals(model: Any) -> bool:
    return hasattr(model, "predict_interval") and model.model_.inference == "variational"


def _predicted(model: Any, asked: s.Predict) -> list[dict[str, Any]]:
    pairs = [(pair.row, pair.column) for pair in asked.pairs]
    values = model.predict(pairs).tolist()
    found = [
        {"row": row, "column": column, "prediction": _plain(value)}
        for (row, column), value in zip(pairs, values, strict=True)
    ]
    if asked.coverage is not None:
        if not hasattr(model, "predict_interval"):
            raise ValueError(f"{type(model).__name__} has no intervals: leave coverage out")
        low, high = model.predict_interval(pairs, asked.coverage)
        for place, one in enumerate(found):
            one |= {"low": _plain(float(low[place])), "high": _plain(float(high[place]))}
    return found


def _for_new(service: Service, version: Version, asked: s.RecommendNew) -> dict[str, Any]:
    """The list of a new row, with an interval for each place where the model has intervals."""
    model = version.model
    values = _values(asked.ratings)
    known = {"features": asked.features} if asked.features else {}
    columns = columns_of_answer(model.recommend_new(values, **_choice(asked), **known))
    places = columns[model.names_[1]]
    if _has_intervals(model) and places:
        with collected():  # what the list has warned of already
            low, high = model.predict_new_interval(
                list(values), list(values.values()), places, asked.coverage, **known
            )
        columns |= {"low": low.tolist(), "high": high.tolist()}
    return service.rows(version, columns)


def _explained(version: Version, asked: s.Explain) -> Any:
    model = version.model
    if not hasattr(model, "explain"):
        raise ValueError(f"{type(model).__name__} cannot explain its predictions")
    known = {"features": asked.features} if asked.features else {}
    who = asked.row if asked.ratings is None else _values(asked.ratings)
    return model.explain(who, asked.column, asked.k, **known)
