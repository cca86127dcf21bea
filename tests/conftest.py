"""Same examples and same rounding on every run."""

import torch
from hypothesis import settings

settings.register_profile("fasterisnet", deadline=None, derandomize=True)
settings.load_profile("fasterisnet")
torch.set_num_threads(1)
