"""Decoding: few queries against a long cache."""
