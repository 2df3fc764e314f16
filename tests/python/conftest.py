import os
import sys

import hypothesis
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

# Reproducible, and never a failure because the machine was busy.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=60,
    print_blob=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("default")


@pytest.fixture
def rng():
    return np.random.default_rng(0)
