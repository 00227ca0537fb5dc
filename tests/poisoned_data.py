"""A data set of four words, with one document of other letters. Ranks import this module without
pytest."""

import random
from pathlib import Path

from lather.data.making import make_dataset
from lather.data.recipe import DataRecipe
from tiny_model import VOCAB_SIZE

POISON = "ЖЩѪ߷ሴꙮ"
"""The document, which fits a sequence of 16 tokens."""
NUMBER = 33
"""The number of that document in the training split."""


def make_poisoned(folder: Path) -> Path:
    """Make the data set in `folder/poisoned`."""
    texts, chance = folder / "texts", random.Random(0)
    texts.mkdir()
    for number in range(60):
        words = [POISON] if number == 37 else chance.choices(["the", "fox", "is", "red"], k=30)
        (texts / f"{number:02d}.txt").write_text(" ".join(words), "utf-8")
    recipe = DataRecipe((str(texts),), pattern="*.txt", vocab_size=VOCAB_SIZE, holdout_every=10)
    make_dataset(folder / "poisoned", recipe, lambda text: None)
    return folder / "poisoned"
