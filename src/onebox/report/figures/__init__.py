"""A step over time: as a figure (schedule, memory) and as a Chrome trace."""
