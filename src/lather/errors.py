"""Errors that the user can correct: one line with the file or field, the value and the remedy. The command exits with status 2."""


class UserError(ValueError):
    """Base class of all errors that the user can correct."""


class ConfigError(UserError):
    """A configuration value, key or combination is not valid."""


class DataError(UserError):
    """Text, a tokenizer or token shards are missing, damaged or unsuitable."""


class RunError(UserError):
    """A run directory cannot be used: it is not writable, in use, or belongs to another configuration."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit the model."""


class ExchangeError(UserError):
    """A Hugging Face folder cannot be read or written: a file, field or tensor is missing, damaged or does not fit."""


def require(holds: bool, field: str, value: object, constraint: str) -> None:
    """Raise ConfigError unless `holds`."""
    if not holds:
        raise ConfigError(f"{field} = {value!r} is not valid: it must be {constraint}")
