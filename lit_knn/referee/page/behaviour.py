"""Say in words what is unusual about an entry."""

from lit_knn.referee.page.front import ROUNDING
from lit_knn.referee.page.markdown import error
from lit_knn.referee.page.results import Entry

# A pixel value is this wide in [-1, 1]; a smaller deviation shows in no image.
PIXEL = 2 / 255
# The column, an answer, and what it says.
ANSWERS = (
    ("repeats_itself", "no", "the same generator does not give the same estimate"),
    ("needs_source", "yes", "needs the image that z was made from"),
    ("needs_source", "uses it", "uses the image that z was made from, if it is given"),
)
# The column, what was tried, the largest usual number, and what a larger one says.
SIZES = (
    ("batch_gap", "batches of one latent", ROUNDING, "batches of one latent and of {batch} differ by an MSE of {size}"),
    (
        "small_t",
        "a hundredth of the smallest t",
        ROUNDING,
        "at a hundredth of the smallest t its MSE to the nearest image is {size}",
    ),
    ("float16", "float16 input", PIXEL, "float16 input moves the estimate by up to {size}"),
)


def unusual(entry: Entry) -> list[str]:
    """List what is unusual about an entry, in words; empty if nothing is."""
    facts = entry.facts
    said = [words for column, answer, words in ANSWERS if facts[column] == answer]
    for column, tried, usual, words in SIZES:
        try:
            size = float(facts[column] or 0)
        except ValueError:  # It failed, and the column has the message.
            said.append(f"{tried}: {facts[column]}")
            continue
        if size > usual:
            said.append(words.format(batch=facts["batch"], size=error(size)))
    return said
