"""Every error that a user can meet, by name."""

from tilery.base.errors import *  # noqa: F403
