import os
import sys

import hypothesis
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))

# For JAX, before it is imported: several devices, which the tests of sharding need, and no
# optimization, because compilation takes nearly all of the tests' time.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)

# Several test processes share a GPU, so none may take most of its memory, which is JAX's default.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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
