"""Attention over sequences that are sharded over the ranks of a mesh.

`assignment.py` says which chunks of a sequence a rank holds, `live_boxes.py` which of them see each other, and
`plan.py` what travels and what is computed, for any number of ranks and without any. `exchange.py` sends, `merge.py`
adds partial results up, `ring.py` and `ring_backward.py` order both, and `context_parallel.py` is what a user calls.

A chunk of queries meets a chunk of keys in one call of the usual kernels, whose mods get numbers added to their
indices, as run-time arguments (`offsets.py`): the same kernels serve all ranks and steps, and the mask analysis yields
their bounds in terms of the numbers. What the mask proves dead is neither sent nor computed, down to rows.
"""
