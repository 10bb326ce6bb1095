"""Restrictions that a worker puts on itself: Landlock, seccomp, capabilities, and the allow-lists of operators."""
