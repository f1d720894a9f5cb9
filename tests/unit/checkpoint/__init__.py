"""Tests of weights on disk."""
