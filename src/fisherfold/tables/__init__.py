"""Data frames and files to arrays and back: ids, columns, readers, writers."""
