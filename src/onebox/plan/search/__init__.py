"""The planner: starting layouts, local search, baselines and the result of a search."""
