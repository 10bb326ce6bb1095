"""Plans from measurements: profiles of a model on a pool, the best plan, shares, formats, fit in memory."""
