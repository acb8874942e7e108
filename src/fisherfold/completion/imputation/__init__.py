"""Filling the holes of tables: the imputer, its columns, draws and their pooling."""
