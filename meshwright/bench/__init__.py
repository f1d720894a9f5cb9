"""Measurements: single kernels, links, whole steps; each beside what the planner promised."""
