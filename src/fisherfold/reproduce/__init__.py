"""The figures and tables of the paper, one file each."""

from fisherfold.extras import need

need("matplotlib")
