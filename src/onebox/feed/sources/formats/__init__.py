"""Bounded readers of file formats (tar, NumPy, IDX, Parquet, Arrow, fixed-size records) and the helpers for tables;
none of them is a source."""
