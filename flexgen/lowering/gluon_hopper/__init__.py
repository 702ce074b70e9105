"""Planning of Gluon kernels for Hopper: TMA loads, asynchronous matrix instructions, specialised warps."""
