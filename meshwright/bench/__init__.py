"""Measurements: single kernels, links, whole steps; each beside its prediction."""
