"""Gluon: Triton's compiler with the layouts, barriers and copies in the author's hands. Launches are Triton's."""

from tilery.languages.triton_glue import Descriptor, bind, compile

__all__ = ["Descriptor", "bind", "compile"]
