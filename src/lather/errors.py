"""Errors that the user can put right: one line that names the file or field, the value and the remedy. The command exits with status 2."""


class UserError(ValueError):
    """Base of all errors that a user can put right."""


class ConfigError(UserError):
    """A configuration value, key or combination that cannot be used."""


class DataError(UserError):
    """Text, tokenizer or token shards that are missing, damaged or unfit."""


class RunError(UserError):
    """A run directory that cannot be used: not writable, in use, or another configuration's."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit the model."""


class ExchangeError(UserError):
    """A Hugging Face folder that cannot be read or written: a file, field or tensor that is missing, damaged or does not fit."""


def require(holds: bool, field: str, value: object, constraint: str) -> None:
    """Raise ConfigError unless `holds`."""
    if not holds:
        raise ConfigError(f"{field} = {value!r} is not valid: it must be {constraint}")
