"""``python -m fisherfold`` is the command line."""

from fisherfold.cli import main

main()
