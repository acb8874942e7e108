"""Requests and answers of the service, as OpenAPI describes them, and limits of a request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Largest numbers of ids, pairs and places in a list of one request.
MOST_IDS = 1_000
MOST_PAIRS = 10_000
MOST_PLACES = 1_000
# Largest number of places in the lists of one request together.
MOST_ANSWERS = 50_000

Id = int | str
Ids = Annotated[list[Id], Field(min_length=1, max_length=MOST_IDS)]
Columns = Annotated[list[Id], Field(max_length=MOST_PAIRS)]
Places = Annotated[int, Field(ge=1, le=MOST_PLACES)]
Features = dict[str, float | str | None]


class Request(BaseModel):
    """A request body; names that are not known are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Pair(Request):
    """A row and a column of the table."""

    row: Id
    column: Id


class Rating(Request):
    """A value that a row has given to a column."""

    column: Id
    value: float


class Predict(Request):
    """Pairs whose values are wanted."""

    pairs: Annotated[list[Pair], Field(min_length=1, max_length=MOST_PAIRS)]
    coverage: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="The probability of the intervals; none are given without it."
    )


class Choice(Request):
    """How a list is chosen."""

    k: Places = 10
    candidates: Columns | None = Field(None, description="The columns to choose from.")
    exclude: Columns = Field([], description="Columns that are left out.")
    exclude_seen: bool = True
    by: Literal["mean", "upper", "sample"] = "mean"
    seed: int | None = None


class Recommend(Choice):
    """Rows that want a list."""

    ids: Ids

    @model_validator(mode="after")
    def _bounded(self) -> Recommend:
        return _bounded(self)


class RecommendNew(Choice):
    """A new row that wants a list, from a few of its ratings."""

    ratings: Annotated[list[Rating], Field(max_length=MOST_PAIRS)]
    features: Features = Field({}, description="Features of the new row, if the model has some.")
    coverage: Annotated[float, Field(gt=0, lt=1)] = 0.8


class Similar(Request):
    """Ids whose like are wanted."""

    ids: Ids
    k: Places = 10
    of: Literal["columns", "rows"] = "columns"

    @model_validator(mode="after")
    def _bounded(self) -> Similar:
        return _bounded(self)


def _bounded(asked: Any) -> Any:
    """Raise if the lists of a request are too long together."""
    if len(asked.ids) * asked.k > MOST_ANSWERS:
        raise ValueError(
            f"{len(asked.ids)} ids with k = {asked.k} are more than {MOST_ANSWERS:,} places "
            "together: ask for less at a time"
        )
    return asked


class Explain(Request):
    """A pair, or a new row's ratings and a column, whose prediction is to be explained."""

    row: Id | None = None
    ratings: Annotated[list[Rating], Field(max_length=MOST_PAIRS)] | None = None
    column: Id
    k: Places = 10
    features: Features = Field({}, description="Features of the new row, if the model has some.")


class Event(Rating):
    """A new rating, with a key that makes its delivery idempotent."""

    row: Id
    key: Annotated[str, Field(min_length=1, max_length=200)]


class Update(Request):
    """New ratings for the model."""

    events: Annotated[list[Event], Field(min_length=1, max_length=MOST_PAIRS)]


class Prediction(BaseModel):
    """The prediction of a pair."""

    row: Id
    column: Id
    prediction: float | None
    low: float | None = None
    high: float | None = None


class Table(BaseModel):
    """Rows of an answer: dictionaries with the model's own names of columns."""

    rows: list[dict[str, Any]]
    version: str
    warnings: list[str] = []


class Predictions(BaseModel):
    """Predictions, in the order of the request."""

    predictions: list[Prediction]
    version: str
    warnings: list[str] = []


class Title(BaseModel):
    """A column and what people call it."""

    id: Id
    title: str


class Found(BaseModel):
    """Columns that were searched for, the best first."""

    found: list[Title]
    warnings: list[str] = []


class Updated(BaseModel):
    """How many events were read, and the version that has them."""

    events: int
    version: str
    warnings: list[str] = []


class Problem(BaseModel):
    """What was wrong with a request, in a sentence."""

    detail: str
