"""Images with masks, and the biased benchmarks of the paper."""

from fasterisnet.data.base import BadImageError, Reading, Samples, Source, Subset, hold_out
from fasterisnet.data.check import check_data
from fasterisnet.data.reader import Reader, read_image, read_mask
from fasterisnet.data.sources import open_source

__all__ = [
    "BadImageError", "Reader", "Reading", "Samples", "Source", "Subset", "check_data", "hold_out", "open_source",
    "read_image", "read_mask",
]  # fmt: skip
