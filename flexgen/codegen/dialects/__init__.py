"""How each IR op is spelled in a kernel language."""
