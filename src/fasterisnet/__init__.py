"""Image classifiers that ignore the background, by training their LRP heatmaps."""

from fasterisnet.relevance import targets
from fasterisnet.relevance.explain import explain

__all__ = ["explain", "targets"]
