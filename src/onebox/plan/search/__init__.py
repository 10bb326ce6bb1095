"""The planner: starting layouts, cuts of a chain, groups of devices, placement, local search, baselines, results."""
