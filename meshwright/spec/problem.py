"""What is wrong with something a user gave, as a value."""

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One mistake in the user's words, and what to do about it."""

    text: str
    remedy: str
    key: str = ""  # the dotted key to look at
    where: str = ""  # file and line, or the command line; filled in by whoever loaded the run

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.text}; {self.remedy}"


class InputError(ValueError):
    """What the user gave cannot be used. Ends a command with exit code 2 and the problems on the screen."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def mistake(text: str, remedy: str, key: str = "") -> InputError:
    """An InputError of a single problem."""
    return InputError([Problem(text, remedy, key)])
