"""Capture: from the user's Python callables to IR graphs, and the cheap re-reading of what they captured."""
