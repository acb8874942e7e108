"""``fisherfold complete export``: a model for serving, as small as it gets."""

from __future__ import annotations

from fisherfold.cli.common import command
from fisherfold.cli.complete.options import app
from fisherfold.cli.complete.tables import load, size
from fisherfold.cli.options import Folder, Output, check_output, write_or_rescue
from fisherfold.cli.voice import Voice


@command(app, examples=["fisherfold complete export model/ -o slim/"])
def export(voice: Voice, folder: Folder, output: Output) -> None:
    """Write a model for serving: without ratings, and without covariances of rows."""
    from fisherfold.completion.files import KIND

    check_output(output, KIND)
    model = load(folder)
    write_or_rescue(lambda place: model.save(place, slim=True), output)
    bytes_of = [sum(each.stat().st_size for each in place.iterdir()) for place in (folder, output)]
    found = {"MB before": bytes_of[0] / 1e6, "MB": bytes_of[1] / 1e6}
    voice.result(f"Exported {folder.name}", {**size(model), **found, "model": str(output)})
