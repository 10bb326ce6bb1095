"""Data sets with a training and a test part, in memory or on disk, and their names on the command line; file readers
are in onebox.feed.sources."""
