"""The shapes of a model, from the numbers of its config.json. No weights, no transformers."""

from tilery.models.configs import from_config, known, load
from tilery.models.model import Linear, Model

__all__ = ["Linear", "Model", "from_config", "known", "load"]
