"""A nested state as one safetensors file: tensors by number, everything else as JSON, no pickle.

``pack`` replaces every tensor of a tree of dicts, lists and plain values by its number; ``unpack`` puts them back. What
is in several places of the tree, as curvature is in the state of an optimizer, is written once.
Dictionaries are written as lists of pairs, because the keys of an optimizer's state are integers.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fisherfold.files import read_tensors, sound, write_tensors
from fisherfold.training.options import with_defaults

KIND, VERSION = "training", 1


def pack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Take the tensors out of a tree.

    Args:
        tree: dicts, lists, tuples, tensors, numbers, strings, booleans and None.
        tensors: where the tensors go, by number.

    Returns:
        The rest, as JSON can hold it.

    Raises:
        TypeError: if there is anything else in the tree.
    """
    if isinstance(tree, Tensor):
        name = next((name for name, tensor in tensors.items() if tensor is tree), str(len(tensors)))
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, dict):
        return {"pairs": [[pack(key, tensors), pack(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return {"list": [pack(value, tensors) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    raise TypeError(f"a checkpoint holds tensors and plain values, got {type(tree).__name__}")


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Put the tensors back.

    Args:
        tree: what ``pack`` returned.
        tensors: what it filled.

    Returns:
        The first tree, with lists for tuples.

    Raises:
        ValueError: if ``pack`` never returned that.
    """
    if not isinstance(tree, dict) or len(tree) != 1 or next(iter(tree)) not in {"tensor", "pairs", "list", "value"}:
        raise ValueError(f"its tree holds {str(tree)[:40]!r}")
    kind, content = next(iter(tree.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "pairs":
        return {unpack(key, tensors): unpack(value, tensors) for key, value in content}
    return [unpack(value, tensors) for value in content] if kind == "list" else content


def save(path: str | os.PathLike[str], state: dict[str, Any], header: dict[str, Any]) -> None:
    """Write a state atomically.

    Args:
        path: the file.
        state: a tree.
        header: what the run is, compared on loading.
    """
    tensors: dict[str, Tensor] = {}
    tree = pack(state, tensors)
    write_tensors(path, tensors, kind=KIND, version=VERSION, header={"tree": tree, "run": header})


def load(path: str | os.PathLike[str], header: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Read a state.

    Args:
        path: the file.
        header: what the run is.
        device: where the tensors go.

    Returns:
        The tree; a file of another run is refused.
    """
    tensors, content = read_tensors(path, kind=KIND, version=VERSION, device=str(device))
    with sound(path, KIND):
        theirs = dict(content["run"])
    refuse_another(path, theirs, header)
    with sound(path, KIND):
        state: dict[str, Any] = unpack(content["tree"], tensors)
    return state


def refuse_another(path: str | os.PathLike[str], theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Refuse the file of another run.

    Args:
        path: the file.
        theirs: what its run is.
        mine: what this run is, as far as it is known.

    Raises:
        ValueError: if they differ in anything that is named.
    """
    seen = _flat(theirs)
    for key, value in _flat(mine).items():
        if seen.get(key) != value:
            raise ValueError(
                f"{path} is of another run: its {key} is {seen.get(key)!r}, this one's is {value!r}; choose another "
                "folder, or delete the file to start again"
            )


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """What tells runs apart: by what preset settings were called does not."""
    named = {**run, **with_defaults(run.get("settings", {}))}
    return {key: value for key, value in named.items() if key not in {"settings", "preset"}}
