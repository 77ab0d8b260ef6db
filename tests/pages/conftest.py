"""What tests of pages share."""

import pytest

from tilery.base import settings
from tilery.measure.store import Store


@pytest.fixture
def store(tmp_path):
    """A store of this test's own, which the command line sees too."""
    with settings.override(data_dir=tmp_path):
        yield Store()
