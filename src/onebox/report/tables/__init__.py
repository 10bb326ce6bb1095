"""Plans, profiles, devices, agents and memory as tables and lines of text, and predictions beside measurements; writes
no file."""
