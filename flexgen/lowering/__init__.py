"""From captured mods and a problem to a frozen plan: analysis, target facts, decisions."""
