"""The shapes of a model, from the numbers of its config.json. No weights, no transformers."""

from tilery.models.configs import document, from_config, known, load
from tilery.models.model import WEIGHTS, Linear, Model

__all__ = ["WEIGHTS", "Linear", "Model", "document", "from_config", "known", "load"]
