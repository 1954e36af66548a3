"""Typed records of a run: its settings and its result."""
