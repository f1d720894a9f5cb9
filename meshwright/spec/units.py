"""Units in which sizes are shown, inside the program they are bytes; and counts as they are written."""

GIB = 2**30  # bytes


def plural(number: int, noun: str) -> str:
    """A count with its noun, as in 1 rank and 2,000 samples."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
