"""Same examples and same rounding on every run; the environment may ask for other ones."""

import gc
import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Not where tests are only handed out to workers: that needs none of these imports."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch
    from hypothesis import core, settings

    from seeds import SEED

    settings.register_profile("fasterisnet", deadline=None, derandomize=SEED == 0)
    settings.load_profile("fasterisnet")
    core.global_force_seed = SEED or None
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at its million objects again and again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Extensions say at the end what nobody gave back."""
    gc.unfreeze()
