"""Effects: build, cache and launch kernels, and read the block tables they walk."""
