"""From TOML and overrides to a run with every choice made, and every rule between its fields."""
