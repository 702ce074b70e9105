"""Differential fuzzing: drawn mods, shapes, layouts and options, against dense attention in float64."""
