"""Times as numbers: seconds since 1970 of dates and ISO text, numbers as they are."""

from __future__ import annotations

import polars as pl

_DATE = r"^\d{4}-\d\d-\d\d"


def seconds(column: pl.Series) -> pl.Series:
    """Convert a column; null where a cell is neither. A date without a time zone is taken as UTC.

    Example:
        >>> seconds(pl.Series(["1970-01-02", "1970-01-01T01:00:00", "soon"])).to_list()
        [86400.0, 3600.0, None]
        >>> seconds(pl.Series(["881250949", "3"])).to_list()
        [881250949.0, 3.0]
    """
    if column.dtype == pl.String:
        column = column.str.strip_chars()
        dates = column.str.contains(_DATE).fill_null(False)
        if not dates.any():
            return column.cast(pl.Float64, strict=False)
        text = pl.select(pl.when(dates).then(column)).to_series()
        column = text.str.to_datetime(time_unit="us", strict=False, time_zone="UTC")
    if column.dtype.is_temporal():
        return (
            column.cast(pl.Datetime("us", getattr(column.dtype, "time_zone", None))).dt.timestamp(
                "us"
            )
            / 1e6
        )
    return column.cast(pl.Float64)
