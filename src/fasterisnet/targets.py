"""What can be explained: the named targets of `explain`."""

from fasterisnet.lrp.targets import (
    AllLogits,
    Eta,
    EtaOfLowest,
    Highest,
    Joint,
    Logit,
    Lowest,
    Probability,
)

__all__ = ["AllLogits", "Eta", "EtaOfLowest", "Highest", "Joint", "Logit", "Lowest", "Probability"]
