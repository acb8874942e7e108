"""Which columns of a table of ratings stand for what.

Unless they are named, the first ones are row id, column id and value. A data frame writes its index to CSV before its
columns, and to Parquet behind them, where it says so: an index that holds the ids of ratings is then read first, as
``reset_index`` would put it, and where an index may be either ids or numbers of lines the table is refused.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

_INDEX = ("index", "Unnamed: 0", "level_0")
_RATINGS = ("rating", "ratings", "score", "stars")
_MARK, _LENGTH = b"PAR1", 4


def index_of(source: Path | bytes, columns: list[str]) -> list[str]:
    """The columns of a Parquet file that were the index of a pandas data frame.

    Args:
        source: the file, or its content.
        columns: the names of its columns.

    Returns:
        Their names, level by level; nothing where the file does not say, or the index was a range.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as opened:
        size = opened.seek(0, 2)
        end = len(_MARK) + _LENGTH
        opened.seek(max(size - end, 0))
        tail = opened.read(end)
        length = int.from_bytes(tail[:_LENGTH], "little")
        if tail[_LENGTH:] != _MARK or length > size - end:
            return []
        opened.seek(size - end - length)
        footer = opened.read(length)
    # the description of the frame is text in the footer, in the order that pandas writes it
    place = footer.find(b'{"index_columns"')
    if place < 0:
        return []
    try:
        described, _ = json.JSONDecoder().raw_decode(footer[place:].decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return []
    levels = described["index_columns"]
    return [name for name in dict.fromkeys(map(str, levels)) if name in columns] if isinstance(levels, list) else []


def chosen(
    names: list[str], columns: tuple[str, ...] | None, roles: tuple[str, ...], path: str | Path,
    header: list[str] | None, index: list[str],
) -> list[str]:  # fmt: skip
    """The names of the wanted columns.

    Args:
        names: those of the table.
        columns: the wanted ones by name or by position from 1; the first ones if not given.
        roles: what they stand for.
        path: where the table comes from, for messages.
        header: the names that the file itself gave; None if it gave none.
        index: those that were the index of a data frame, from ``index_of``.

    Returns:
        One name per role.

    Raises:
        ValueError: if there is no such column, one is named twice, or the first ones are not what they are taken for.
    """
    if columns is None:
        return _first(names, roles, path, header, index)
    if len(columns) != len(roles):
        raise ValueError(f"{len(roles)} columns are wanted ({', '.join(roles)}), got {', '.join(columns)}")
    found = []
    for wanted in columns:
        if wanted in names:
            found.append(wanted)
        elif wanted.isdecimal() and 1 <= int(wanted) <= len(names):
            found.append(names[int(wanted) - 1])
        else:
            raise ValueError(f"{path} has no column {wanted!r}; it has {names} (or positions 1 to {len(names)})")
    if len({*found}) < len(found):
        raise ValueError(f"{path}: {', '.join(columns)} name a column twice, {', '.join(roles)} are different ones")
    return found


def in_order(names: list[str], index: list[str], wanted: int) -> list[str]:
    """The columns of a table with an index that holds ids before the others.

    Args:
        names: those of the table.
        index: those of them that were the index of a data frame.
        wanted: how many columns are wanted.

    Returns:
        The names; an index of one level beside enough columns stays where it is.
    """
    if len(index) < 2 and len(names) > wanted:
        return names
    return [*index, *(name for name in names if name not in index)]


def _first(
    names: list[str], roles: tuple[str, ...], path: str | Path, header: list[str] | None, index: list[str]
) -> list[str]:
    """The first columns, if nothing speaks against them."""
    if len(names) < len(roles):
        raise ValueError(f"{path} must have {len(roles)} columns ({', '.join(roles)}), got {names}")
    ordered = in_order(names, index, len(roles))
    found, advice = ordered[: len(roles)], f"name the columns ({', '.join(roles)}), as in --columns"
    if header is None:
        return found
    nameless = header[0] == "column_1" and header[1] != "column_2"
    if (nameless or header[0] in _INDEX or _unnamed(header[0])) and len(header) > len(roles) and not index:
        # what a data frame writes before its columns is a number of lines, and hardly an id
        what = "has no name" if nameless else f"is {header[0]!r}"
        raise ValueError(
            f"{path}: the first column {what}, like the index of a data frame; {advice} "
            f"{','.join(header[1 : len(roles) + 1])}"
        )
    if len(index) == 1 and ordered is names and not _unnamed(index[0]):
        others = [*index, *(name for name in names if name not in index)][: len(roles)]
        raise ValueError(
            f"{path}: column {index[0]!r} was the index of a data frame, of ids or of numbers of lines; {advice} "
            f"{','.join(others)} or {','.join(found)}"
        )
    ratings = [name for name in found[:2] if is_rating(name)]
    if ratings and not any(is_rating(name) for name in found[2:]):
        meant = [*(name for name in ordered if name not in ratings), *ratings][: len(roles)]
        role = roles[found.index(ratings[0])]
        raise ValueError(f"{path}: the first columns make {ratings[0]!r} a {role} id; {advice} {','.join(meant)}")
    return found


def is_rating(name: str) -> bool:
    """Whether the name of a column says that it holds ratings.

    Args:
        name: the name.

    Returns:
        The answer.

    Examples:
        >>> is_rating("Stars"), is_rating("user")
        (True, False)
    """
    return name.lower() in _RATINGS


def _unnamed(name: str) -> bool:
    """Whether pandas has named a level of an index that had no name."""
    return name.startswith("__index_level_") and name.endswith("__")
