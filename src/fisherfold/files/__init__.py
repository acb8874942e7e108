"""Files that are whole or absent: atomic writing and claims, tensors with a checked header, folders of models."""

from fisherfold.files.atomic import check_place, claimed, make_folder, write_atomically
from fisherfold.files.models import MODEL, check_model_folder, model_folder
from fisherfold.files.tensors import HEADER, HEADER_LIMIT, digest, parse_json, read_tensors, sound, write_tensors

__all__ = [
    "HEADER", "HEADER_LIMIT", "MODEL", "check_model_folder", "check_place", "claimed", "digest", "make_folder",
    "model_folder", "parse_json", "read_tensors", "sound", "write_atomically", "write_tensors",
]  # fmt: skip
