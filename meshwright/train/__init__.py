"""The trainer: obeys a plan and never chooses anything."""
