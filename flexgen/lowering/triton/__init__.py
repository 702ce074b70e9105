"""The plain Triton backend's plan."""
