"""Which columns of a table hold row ids, column ids and values.

    usual_columns(["userId", "movieId", "rating", "timestamp"])    # ["userId", "movieId", "rating"]

Where no column has a usual name of a value, the only one beside the ids is it; times and an index
do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

PAIRS = ("row", "column")
ENTRIES = ("row", "column", "value")
_USUAL = {
    "row": "u user username customer cust person member reviewer reader rater row",
    "column": "i item movie film product book isbn track song artist business asin joke game anime "
    "recipe title column col",
    "value": "r rating ratings value values score scores stars star grade y",
    "time": "t ts day month year when",
    "index": "index unnamed indexlevel id",
}
_ROLE_OF = {name: role for role, names in _USUAL.items() for name in names.split()}
_ROLE_OF |= {f"{name}id": role for role in PAIRS for name in _USUAL[role].split()}
_CALLED = {"row": "row id", "column": "column id", "value": "value"}


def usual_columns(
    names: Sequence[Any], roles: Sequence[str] = ENTRIES, *, optional: bool = False
) -> list[Any]:
    """Find the columns of some roles by their usual names.

    Raises LookupError if a role has no column or several; its text lacks what to do.

    Example:
        >>> usual_columns(["index", "item", "user", "liters", "date"])
        ['user', 'item', 'liters']
        >>> usual_columns(["user", "item", "date"], optional=True)
        ['user', 'item']
    """
    found: dict[str, list[Any]] = {role: [] for role in _USUAL}
    others: list[Any] = []
    for name in names:
        found.get(role_of(name), others).append(name)
    if not found["value"] and len(others) == 1:
        found["value"] = others
    if optional and not found["value"] and not others:
        roles = PAIRS
    missing = [_CALLED[role] for role in roles if not found[role]]
    if missing:
        wanted = (
            f"are {', '.join(missing[:-1])} and {missing[-1]}"
            if len(missing) > 1
            else f"is the {missing[0]}"
        )
        raise LookupError(f"cannot tell which of the columns {_few(names)} {wanted}")
    for role in roles:
        if len(found[role]) > 1:
            several = " and ".join(map(repr, found[role]))
            raise LookupError(f"the columns {several} could each be the {_CALLED[role]}")
    return [found[role][0] for role in roles]


def role_of(name: Any) -> str:
    """The role that a column has by its name: row, column, value, time, index or none."""
    plain = re.sub(r"[\W\d_]", "", str(name).lower())
    return (
        "time"
        if "time" in plain or "date" in plain
        else _ROLE_OF.get(plain, "" if plain else "index")
    )


def check_half_known(names: Sequence[Any], known: Sequence[str]) -> None:
    """Raise if one name of the ids is there and the other is not: positions could swap them."""
    texts = list(map(str, names))
    there = [name for name in known[:2] if name in texts]
    if len(there) == 1:
        absent = next(name for name in known[:2] if name not in there)
        raise ValueError(
            f"the columns {_few(names)} have {there[0]!r} as the table of the fit, but no "
            f"{absent!r}: rename the column of {absent!r}, or rename both to be read by position"
        )


def may_hold_row_ids(name: Any) -> bool:
    """Whether the first column of a matrix may hold the ids of its rows."""
    return not re.fullmatch(r"\d*", str(name)) and role_of(name) in ("row", "index")


def named_columns(
    names: Sequence[Any], columns: Any, roles: Sequence[str] = ENTRIES, least: int = 3
) -> list[Any]:
    """Check the names of columns that were given for some roles."""
    if isinstance(columns, str) or not min(least, len(roles)) <= len(columns) <= len(roles):
        raise ValueError(
            f"columns must name {len(roles)} columns ({', '.join(roles)}), got {columns!r}"
        )
    if missing := [name for name in columns if name not in names]:
        raise ValueError(f"there is no column {missing[0]!r}; the data frame has {_few(names)}")
    return list(columns)


def _few(names: Sequence[Any]) -> str:
    return f"[{', '.join(map(repr, names[:20]))}{', ...' if len(names) > 20 else ''}]"
