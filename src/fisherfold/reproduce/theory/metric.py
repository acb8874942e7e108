"""Part 1 as a whole: the expansion of KL and the steepest-descent characterisation (Theorem 1)."""

from __future__ import annotations

from fisherfold.reproduce.theory import divergence, steepest
from fisherfold.reproduce.theory.pictures import draw_metric
from fisherfold.reproduce.theory.report import Part, Settings


def part(settings: Settings) -> Part:
    """Run this part."""
    slopes, scenes = divergence.measure(settings), steepest.measure(settings)
    sentence = (
        "For every likelihood, manifold and retraction KL departs from ½t²<d, F d> by a term of order t³, and at equal "
        "small KL no direction decreases the loss more than the natural one. The hypothesis of a second-order "
        "retraction is not needed for that: QR and Cayley on Stiefel show the same slope 3. It is needed where the "
        "gradient does not vanish, for the second-order model of the loss itself."
    )
    table = [{"section": "slope", **{k: v for k, v in r.items() if k != "errors"}} for r in slopes]
    table += [{"section": "steepest", **r} for r in scenes]
    return Part(
        "metric", "The RFIM is the metric of KL", sentence,
        divergence.findings(slopes, settings) + steepest.findings(scenes), table,
        draw_metric(divergence.STEPS, slopes, scenes),
    )  # fmt: skip
