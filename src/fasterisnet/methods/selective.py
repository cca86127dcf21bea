"""The Selective ISNet: the least likely class, explained against all others."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fasterisnet.lrp.targets import EtaOfLowest, Target
from fasterisnet.methods.base import register_method
from fasterisnet.methods.isnet import ISNet


@register_method("selective")
class Selective(ISNet):
    """One map a sample: eta, the bounded log odds, of its least likely class (paper: SelectiveISNet)."""

    multi_label: ClassVar[bool] = False

    def targets(self, logits: Tensor) -> list[tuple[str, Target]]:
        return [("epsilon", EtaOfLowest())]
