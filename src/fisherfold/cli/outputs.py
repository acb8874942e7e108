"""Names of 0.1.0, until their users import them from ``options``."""

from fisherfold.cli.options import (
    Output,
    Predictions,
    check_output,
    check_predictions,
    say_written,
    write_or_rescue,
)

__all__ = ["Output", "Predictions", "check_output", "check_predictions", "say_written", "write_or_rescue"]
