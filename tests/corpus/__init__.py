"""Masks and score mods as users write them; every ring of tests runs over them."""
