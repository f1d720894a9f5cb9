"""One mistake of the user's, ready to be raised."""

from meshwright.spec.check import InputError, Problem


def mistake(text: str, remedy: str, key: str = "") -> InputError:
    """An InputError of a single problem."""
    return InputError([Problem(text, remedy, key)])
