"""The nouns: frozen values that every other package speaks in. Nothing here reaches torch or numpy."""
