"""Proofs: that a plan computes what one device would, and sends what the arithmetic says."""
