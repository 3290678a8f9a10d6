"""The parts of a page, without a format: `markdown.py` and `html.py` write each of them. All text is plain text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it says.
        small: a second line in small letters, such as the standard error.
        strong: whether it is emphasised.
        key: the number that sorts it; None sorts it by its text.
    """

    text: str
    small: str = ""
    strong: bool = False
    key: float | None = None


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title of the page."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list of points: what it is about, in strong letters, and the text."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table. The columns named in `left` hold text; the others are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: Sequence[str] = ("estimator",)


@dataclass(frozen=True)
class Code:
    """Lines of code or data, shown as they are."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        alt: what it shows, for those who do not see it.
        file: name of the PNG file beside the Markdown.
        svg: the picture itself.
    """

    alt: str
    file: str
    svg: bytes


@dataclass(frozen=True)
class Details:
    """Blocks that a reader opens by a click."""

    summary: str
    blocks: Sequence["Block"]


Block = Heading | Paragraph | Items | Table | Code | Picture | Details
