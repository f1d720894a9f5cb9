"""The kernels: one family a file, each beside the plain arithmetic that it must equal."""
