"""What tests of patched models share."""

import pytest
from tiny import make

import tilery


@pytest.fixture(scope="module")
def made():
    """Models by name, made once; each is unpatched when it is given out."""
    kept = {}

    def get(name):
        kept[name] = kept.get(name) or make(name)
        if "tilery_patched" in vars(kept[name]):
            tilery.unpatch(kept[name])
        return kept[name].eval()

    return get
