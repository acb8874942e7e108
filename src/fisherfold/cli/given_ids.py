"""Ids that commands are given, in words of the command line or in files of pairs: text, as the table of the fit was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fisherfold.cli.voice import Voice
from fisherfold.plain import counted

if TYPE_CHECKING:
    from fisherfold.completion.estimator import MatrixCompletion
    from fisherfold.tables.ids import IdIndex, Ids


def row_id(model: MatrixCompletion, text: str, voice: Voice) -> Any:
    """The row id that a word of the command line stands for, as it would in a file.

    Args:
        model: a fitted model.
        text: the word.
        voice: of the command.

    Returns:
        The id.

    Raises:
        ValueError: if all ids of the model are numbers and this is none, or another one is the same number.
    """
    from fisherfold.tables.ids import id_array, other_form

    index = model.model_.row_ids
    ids = index.meant(id_array([text], "row"))
    check_spelling(index, ids, "row", voice)
    if index.kind == "objects" or not isinstance(ids[0], str):
        return ids[0]
    number, floats = other_form(text), index.labels.dtype.kind == "f"
    if isinstance(number, str) or (isinstance(number, float) and not floats):
        raise ValueError(f"row ids of this model are {'' if floats else 'whole '}numbers, got {text!r}")
    return number


def check_spelling(index: IdIndex, ids: Ids, name: str, voice: Voice, where: str = "") -> None:
    """Refuse ids of which none is known while one that is the same number is; where others are known, say so.

    Args:
        index: the known ids.
        ids: those that are given, as the model means them.
        name: what they name.
        voice: of the command.
        where: where they are given, for messages.

    Raises:
        ValueError: if they are refused.
    """
    from fisherfold.tables.lookalikes import lookalikes

    alike = lookalikes(index, ids)
    if not alike:
        return
    given, known = next(iter(alike.items()))
    told = f"{str(given)!r} was not in the fit, {str(known)!r} was: ids are written as the table had them"
    if bool((index.numbers(ids) < 0).all()):
        raise ValueError(f"{where}{name} {told}")
    voice.remark(f"{where}{counted(len(alike), f'{name} id')} may have lost zeros, for {told}")


def holds_ids(model: MatrixCompletion, fields: list[str], columns: tuple[str, ...] | None) -> bool:
    """Whether the first line of a file of pairs holds an id of the model, and so is data, not a header.

    Args:
        model: a fitted model.
        fields: of the line.
        columns: the columns that were named.

    Returns:
        The answer.
    """
    from fisherfold.tables.ids import id_array

    places = [int(word) - 1 for word in columns or ("1", "2") if word.isdecimal()]
    sides = (model.model_.row_ids, model.model_.column_ids)
    words = [(ids, fields[k].strip()) for ids, k in zip(sides, places, strict=False) if 0 <= k < len(fields)]
    return any(ids.kind == "objects" and ids.numbers(ids.meant(id_array([word], "row")))[0] >= 0 for ids, word in words)
