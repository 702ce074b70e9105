"""Triton's semantics on CPU tensors: a private, interpreted copy of triton.language."""
