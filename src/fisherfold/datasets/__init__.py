"""Named data sets: found in a local folder, in the user's cache, or downloaded with a checksum."""

from fisherfold.datasets.download import fetch
from fisherfold.datasets.kinds import Ratings, Table, Tasks
from fisherfold.datasets.local import (
    data_folder,
    load,
    load_ratings,
    load_tasks,
    stack_outputs,
    verify,
    where,
)
from fisherfold.datasets.official import load_sarcos_file
from fisherfold.datasets.records import REGISTRY, ArrayRecord, DatasetRecord, record

__all__ = [
    "REGISTRY",
    "ArrayRecord",
    "DatasetRecord",
    "Ratings",
    "Table",
    "Tasks",
    "data_folder",
    "fetch",
    "load",
    "load_ratings",
    "load_sarcos_file",
    "load_tasks",
    "record",
    "stack_outputs",
    "verify",
    "where",
]
