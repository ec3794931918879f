"""Settings shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("sparse_marlin", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("sparse_marlin")

torch.set_num_threads(1)  # everything here is small: threads cost more than they bring


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: takes more than a few seconds or a gigabyte (deselect with -m 'not slow')"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same seed and leaves torch's global state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory from torch.empty holds NaN (the largest integer), so that an output element left unwritten is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
