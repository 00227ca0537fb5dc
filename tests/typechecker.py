"""The type checker that conftest.py has jaxtyping use: beartype, with an int welcome where a float is."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
