"""Starting ranks and keeping their folder. Nothing here reaches torch."""
