"""Schedules made from routes or from measured times: named, asynchronous, synthesised; the tables themselves are in
``model``."""
