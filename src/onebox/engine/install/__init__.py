"""Installation of a compiled plan on the workers: programs, constants, groups, requests that nobody waits for."""
