"""Evaluation of layouts: bounds, cuts and placements that are promising, predictions, infeasibility; no search."""
