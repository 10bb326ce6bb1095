"""The planner: starting layouts, cuts of a chain, placement, local search, baselines and the result of a search."""
