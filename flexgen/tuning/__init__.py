"""Searches the options that run fastest on the GPU at hand, for one problem."""
