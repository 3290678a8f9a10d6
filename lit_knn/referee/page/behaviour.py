"""Say in words what is unusual about an entry."""

from lit_knn.referee.page import numbers
from lit_knn.referee.page.front import ROUNDING
from lit_knn.referee.page.results import Entry

# A pixel value is this wide in [-1, 1]; a smaller deviation shows in no image.
PIXEL = 2 / 255
# The column, its usual answer, and what is said of another one.
ANSWERS = (
    ("repeats_itself", "yes", "the same generator does not give the same estimate"),
    ("global_random", "no", "draws from global random generators"),
    ("mutates", "no", "changes z or t"),
)
SOURCE = {
    "yes": "needs the image that z was made from",
    "uses it": "uses the image that z was made from, if it is given",
}
# The column, the largest number that is usual, and what is said of a larger one.
SIZES = (
    ("batch_gap", ROUNDING, "batches of one latent and of {batch} differ by an MSE of {value}"),
    ("small_t", ROUNDING, "at a hundredth of the smallest t its MSE to the nearest image is {value}"),
    ("float16", PIXEL, "float16 input moves the estimate by up to {value}"),
)
FAILURES = {
    "batch_gap": "batches of one latent",
    "small_t": "a hundredth of the smallest t",
    "float16": "float16 input",
}


def unusual(entry: Entry) -> list[str]:
    """List what is unusual about an entry, in words; empty if nothing is."""
    facts = entry.facts
    said = [words for column, usual, words in ANSWERS if facts[column] not in ("", usual)]
    said += [SOURCE[facts["needs_source"]]] if facts["needs_source"] in SOURCE else []
    if facts["seeded"] == "no" and facts["global_random"] == "yes":
        said.append("ignores the generator that it is given")
    for column, usual_size, words in SIZES:
        size = _number(facts[column])
        if size is None:
            said.append(f"{FAILURES[column]}: {facts[column]}")
        elif size > usual_size:
            said.append(words.format(batch=facts["batch"], value=numbers.error(size)))
    return said


def _number(text: str) -> float | None:
    """Read a number; nothing is 0, and text is None."""
    try:
        return float(text or 0)
    except ValueError:
        return None
