"""Meshwright plans, trains and proves large models across many GPUs."""

__version__ = "0.1.0"
