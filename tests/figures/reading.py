"""Read colours and legends back from matplotlib."""

from matplotlib.colors import to_hex


def legend(owner):
    return [text.get_text() for text in owner.get_texts()]


def colour(artist):
    return to_hex(artist.get_color()).upper()
