"""The simulator: time and memory of a schedule, of one step and of a steady state, and its validation; schedules are
made elsewhere."""
