"""One outer loop and the methods that run in it; a solver sees a Problem and never the data."""
