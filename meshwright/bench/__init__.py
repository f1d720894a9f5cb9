"""Measurements: single kernels, links, whole steps; each beside the planner's prediction."""
