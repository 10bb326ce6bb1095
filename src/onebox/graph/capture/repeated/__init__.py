"""Layers of a model that compute the same with other parameters: traced once, and copied within the graph."""
