"""Inputs of the planner for a model and a pool, and the search within exact memory; nothing runs on a worker."""
