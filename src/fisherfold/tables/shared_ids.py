"""Names of 0.1.0, until their callers use ``fisherfold.tables.ids``."""

from fisherfold.tables.ids import Ids, joint_index, objects

__all__ = ["cast", "joint_index"]


def cast(ids: Ids, kind: str) -> Ids:
    """Bring ids to text where those of other processes are.

    Args:
        ids: ids as made by ``as_ids``.
        kind: a dtype.

    Returns:
        The same ids.
    """
    return objects([str(value) for value in ids.tolist()]) if kind == "object" and ids.dtype != object else ids
