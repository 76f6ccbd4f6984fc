"""The errors foredraft raises on purpose.

ForedraftError
├── ConfigError       an option or argument that is out of range, contradictory or not supported
├── ModelError        a model that is unknown, is no model, or cannot be run here
├── CheckpointError   a file that is truncated, tampered with or does not fit its target
├── DownloadError     weights that could not be fetched
└── CapacityError     a request or cache that does not fit the memory or context it was given
"""

from __future__ import annotations


class ForedraftError(Exception):
    """Base of all errors a user can mend; the message names the value, the limit and the way out."""


class ConfigError(ForedraftError, ValueError):
    """An option is out of range, contradicts another one, or is not supported."""


class ModelError(ForedraftError):
    """A model is unknown, is no model, or cannot be run exactly."""


class CheckpointError(ForedraftError):
    """A checkpoint is damaged or does not fit the model it is meant for."""


class DownloadError(ForedraftError):
    """Weights could not be fetched."""


class CapacityError(ForedraftError):
    """A request or a cache does not fit the memory or the context it was given."""
