"""A plan applied to a captured model: the program of each worker and phase, sharding, replica groups, schedules; no
instructions, which are in ``compile``."""
