"""Data of plans: problem, plan, stages, schedules as tables, their costs; no search, no simulation."""
