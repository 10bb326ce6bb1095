"""Evaluation of layouts: bounds, predictions, infeasibility; no search."""
