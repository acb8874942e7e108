"""Named data sets: found in a local folder, in the user's cache, or downloaded with a checksum."""
