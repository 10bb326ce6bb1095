"""Splitting of programs within layers, over ranks or by samples: rules, placements, the search for the cheapest
split."""
