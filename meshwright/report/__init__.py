"""Pictures of plans and runs, for a terminal and for a page; readers only, nothing calls them from training."""
