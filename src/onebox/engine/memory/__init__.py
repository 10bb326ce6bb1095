"""The memory of a compiled step, simulated to the byte: peaks, timelines, limits, forecasts; nothing is allocated or
sent."""
