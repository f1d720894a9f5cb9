"""SVG by hand: few elements, every text and attribute escaped, nothing fetched from anywhere."""

from collections.abc import Iterable
from html import escape
from typing import Any

LETTER = 6.6  # pixels that a letter of 12-pixel text takes at most, on average: labels are placed by it


def element(name: str, inner: str = "", **attributes: Any) -> str:
    """One element. Attributes are escaped; `inner` is markup already."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_written(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>"


def _written(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, **attributes: Any) -> str:
    """Words at a place, shown as they are."""
    return element("text", escape(words) or " ", x=float(x), y=float(y), **attributes)


def rect(x: float, y: float, width: float, height: float, title: str = "", **attributes: Any) -> str:
    """A rectangle that says what it is when it is pointed at, or read aloud."""
    inner = element("title", escape(title)) if title else ""
    return element("rect", inner, x=float(x), y=float(y), width=float(width), height=float(height), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> str:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def drawing(width: float, height: float, name: str, description: str, parts: Iterable[str]) -> str:
    """A whole picture, which tells its name and what it shows to those who cannot see it."""
    known = element("title", escape(name)) + element("desc", escape(description))
    return element(
        "svg",
        known + "".join(parts),
        viewBox=f"0 0 {_written(float(width))} {_written(float(height))}",
        role="img",
        aria_label=f"{name}. {description}",
        preserveAspectRatio="xMinYMin meet",
    )


def fitted(words: str, pixels: float) -> str:
    """Words cut to a width, with a sign that they are."""
    letters = int(pixels / LETTER)
    if len(words) <= letters:
        return words
    return words[: max(letters - 1, 0)] + "…" if letters > 1 else ""


def clear(
    x: float, y: float, pixels: float, taken: list[tuple[float, float, float]], height: float, lowest: float
) -> float:
    """The height nearest to `y`, upwards first, at which words of a width meet no others of `taken` (x, y, width)."""
    for step in range(200):
        for other in (y - step * height, y + step * height):
            inside = height <= other <= lowest
            if inside and not any(
                abs(other - at) < height and x < left + width and left < x + pixels for left, at, width in taken
            ):
                return other
    return y
