"""Ranks, run folders, records, heartbeats and failures: what both towers use. Nothing here reaches torch."""
