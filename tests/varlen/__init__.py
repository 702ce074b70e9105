"""Packed sequences: cu_seqlens and nested tensors."""
