"""What the forward kernels must compute, refuse and report."""
