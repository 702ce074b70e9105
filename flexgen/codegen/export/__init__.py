"""Stand-alone modules: the kernels of one configuration, their launches and their checks, in one file."""
