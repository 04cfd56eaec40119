"""The one error of a configuration that cannot run."""

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key, the value and the remedy."""
