"""A tokenizer and the making of data sets, for the tests of data."""

from pathlib import Path
from typing import Any

import pytest
from making_helpers import Make, texts

from lather.data.dataset import DataSet
from lather.data.documents import train_tokenizer
from lather.data.making import make_dataset
from lather.data.recipe import END_OF_TEXT, DataRecipe


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(texts(50)), 300, END_OF_TEXT).save(str(file))
    return file


@pytest.fixture
def make(tmp_path: Path, tokenizer: Path) -> Make:
    """Make a data set from sources, without held-out documents unless asked for."""

    def make_one(
        *sources: object, name: str = "ours", workers: int = 1, note: Any = print, **options: Any
    ) -> DataSet:
        given = {"tokenizer": str(tokenizer), "holdout_every": 0, **options}
        recipe = DataRecipe(tuple(map(str, sources)), **given)
        return make_dataset(tmp_path / name, recipe, note, workers)

    return make_one
