"""Image classifiers that ignore the background, by training their LRP heatmaps."""

from fasterisnet.errors import FasterISNetError, RuleWarning
from fasterisnet.relevance import targets
from fasterisnet.relevance.check import check
from fasterisnet.relevance.explain import explain

__all__ = ["FasterISNetError", "RuleWarning", "check", "explain", "targets"]
