"""Images with masks, and the biased benchmarks of the paper."""

from fasterisnet.data.base import BadImageError, Reading, Samples, Source, Subset, hold_out
from fasterisnet.data.sources import open_source

__all__ = ["BadImageError", "Reading", "Samples", "Source", "Subset", "hold_out", "open_source"]
