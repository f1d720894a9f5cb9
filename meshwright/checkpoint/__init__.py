"""Weights on disk: what a run leaves behind, what it can begin from, and other people's formats."""
