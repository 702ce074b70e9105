"""The IR of mods: scalar expressions over (score, b, h, q_idx, kv_idx), captured buffers and scalars."""
