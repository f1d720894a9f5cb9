"""Units in which sizes are shown; inside the program they are bytes."""

GIB = 2**30  # bytes
