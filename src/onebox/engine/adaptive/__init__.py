"""Re-planning of a run whose devices or links change speed: measurements, the controller, the migration to another
plan."""
