"""The run-time scheduler: measurements in, decisions about the plan out; pure."""
