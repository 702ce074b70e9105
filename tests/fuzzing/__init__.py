"""The fuzzer: a short run of it, whether it finds what is wrong, and what it found."""
