"""Shared by all tests: one seed a run, printed, and no GPU test where there is no GPU."""

from __future__ import annotations

import gc
import os
import random
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers share two cores
gc.disable()  # what is made until all tests are collected lives as long as the run

collect_ignore = ["artefacts"]  # which has a copy of the project while the notebooks are driven

SEED = int(os.environ.get("FOLDFUSE_TEST_SEED", random.SystemRandom().randrange(2**31)))


def pytest_configure(config):
    """Give every worker of one run the same seed, and interrupts their meaning."""
    os.environ.setdefault("FOLDFUSE_TEST_SEED", str(SEED))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background, and inherited
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config):
    """Print the seed, so that a failure can be repeated."""
    return f"FOLDFUSE_TEST_SEED={os.environ['FOLDFUSE_TEST_SEED']}"


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    import torch  # here, since the process that only hands out tests does without

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish():
    """Collect garbage from now on, only what the tests make, and seldom."""
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.fixture
def seed(record_property) -> int:
    """The run's seed for random inputs, shown with a failing test."""
    print(f"FOLDFUSE_TEST_SEED={SEED}")
    record_property("seed", SEED)
    return SEED
