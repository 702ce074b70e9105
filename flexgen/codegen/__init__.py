"""From mods and a plan to the text of a kernel: printers print what lowering decided."""
