"""Other people's training runs: rows of a table, turned into jobs that can be priced and judged."""
