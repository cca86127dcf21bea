"""What the nodes of autograd's graph compute, by the name torch gives their derivative (`ReluBackward0` is a `Relu`).

Spellings do not exist here: `x @ w`, `torch.mm`, `einsum` and `nn.Linear` all end in a handful of kinds. A kind that
stands in no list has no rule, and relevance that passes it is announced.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.nn.modules._functions import BackwardHookFunction

Node = Any
Edge = tuple[Node, int]

# Every number of the result is the one at the same place of the operand.
SAME = frozenset(
    """
    Clone ToCopy Alias Identity Contiguous Detach LiftFresh NanToNum FakeQuantizePerTensorAffineCachemask
    FusedMovingAvgObsFqHelper
    """.split()
)

# The numbers of one operand in another order or shape, none lost, none repeated.
PERMUTING = SAME | frozenset(
    """
    View UnsafeView ReshapeAlias Permute Transpose T Squeeze Unsqueeze ViewCopy PixelShuffle PixelUnshuffle
    ChannelShuffle NativeChannelShuffle Flip Roll Swapaxes Movedim Unflatten ViewAs
    """.split()
)

RESHAPING = frozenset({"View", "UnsafeView", "ReshapeAlias", "ViewCopy"})

# Every number of the result is one of the operands', or a constant, whatever their values.
MOVING = PERMUTING | frozenset(
    """
    Expand Slice Select Split SplitWithSizes Unbind Cat Stack Repeat Index IndexSelect Gather Take Diagonal AsStrided
    ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D ReplicationPad3D
    Unfold Im2Col Tril Triu Where MaskedFill MaskedSelect MaskedScatter IndexPut IndexPutImpl IndexCopy IndexFill
    Scatter Copy Zero Fill SliceScatter SelectScatter DiagonalScatter DiagEmbed UnsafeSplit
    UnsafeSplitWithSizes Real ViewAsReal ViewAsComplex Rot90 BlockDiag
    MaxUnpool2D MaxUnpool3D Put UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D
    UpsampleNearestExact2D UpsampleNearestExact3D
    """.split()
)

# The same where values decide which number it is: the winner takes all.
WINNING = frozenset(
    """
    MaxPool1D MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool1D AdaptiveMaxPool2D AdaptiveMaxPool3D
    FractionalMaxPool2D FractionalMaxPool3D Max Min Amax Amin Aminmax Sort Topk Kthvalue Mode Median
    NanMedian Cummax Cummin MaxPool2D
    """.split()
)

# Sums of the operands' numbers with weights that are never negative.
POOLING = frozenset(
    """
    Mean Sum AvgPool1D AvgPool2D AvgPool3D AdaptiveAvgPool1D AdaptiveAvgPool2D AdaptiveAvgPool3D MkldnnAdaptiveAvgPool2D
    UpsampleLinear1D UpsampleBilinear2D UpsampleTrilinear3D UpsampleBilinear2DAa
    Cumsum IndexAdd ScatterAdd Nansum
    Col2Im GridSampler2D GridSampler3D Lerp
    """.split()
)

# Linear, with weights of any sign: z+ has no positive part to take.
SIGNED = frozenset(
    """
    UpsampleBicubic2D UpsampleBicubic2DAa UpsampleLanczos2DAa FftR2C FftC2R FftC2C Imag Conj ConjPhysical NegView
    ResolveConj ResolveNeg Trace
    """.split()
)

SUMS = frozenset({"Add", "Sub", "Rsub"})
PRODUCTS = frozenset({"Mul", "Div", "Pow", "Addcmul", "Addcdiv", "Neg", "NativeDropout", "Glu"})
LINEAR = frozenset({"Convolution", "Addmm", "Mm", "Bmm", "Mv", "Addmv", "Baddbmm"})
BILINEAR = frozenset({"Addbmm", "Addr", "Dot", "Vdot", "LinalgVecdot", "Trilinear", "Cross", "LinalgCross"})
BATCH_NORMS = frozenset(
    "NativeBatchNorm NativeBatchNormLegit NativeBatchNormLegitNoTraining CudnnBatchNorm MiopenBatchNorm".split()
)
NORMS = BATCH_NORMS | {"NativeLayerNorm", "NativeGroupNorm"}
SOFTMAXES = frozenset({"Softmax", "SafeSoftmax", "LogSoftmax"})
ATTENTION = frozenset(
    """
    ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
    ScaledDotProductCudnnAttention ScaledDotProductFusedAttentionOverrideable
    """.split()
)
ACTIVATIONS = frozenset(
    """
    Relu Gelu Silu Mish Hardswish LeakyRelu Elu Celu PreluKernel RreluWithNoise Tanh Sigmoid Hardsigmoid Hardtanh
    Softplus LogSigmoid Hardshrink Softshrink Threshold Clamp ClampMin ClampMax Maximum Minimum Fmax Fmin
    """.split()
)

_GROUPS = {
    "linear": LINEAR, "norm": NORMS, "activation": ACTIVATIONS, "sum": SUMS, "product": PRODUCTS, "pool": POOLING,
    "signed": SIGNED, "softmax": SOFTMAXES, "attention": ATTENTION, "move": MOVING | WINNING, "bilinear": BILINEAR,
    "slices": frozenset({"CopySlices"}),
}  # fmt: skip
GROUPS = {kind: group for group, kinds in _GROUPS.items() for kind in kinds}


def kind(node: Node) -> str:
    """What a node computes; Python Functions, whatever their name, get one that no list holds."""
    if isinstance(node, BackwardCFunction):
        function = getattr(node, "_forward_cls", None)
        return "Identity" if function is BackwardHookFunction else f"Function {getattr(function, '__name__', '?')}"
    return _bare(node.name())


@cache
def _bare(name: str) -> str:
    return re.sub(r"Backwards?\d*$", "", name.removeprefix("torch::autograd::"))


@cache
def spoken(name: str) -> str:
    """`AdaptiveAvgPool2D` -> `adaptive_avg_pool2d`."""
    if name.startswith("Function "):
        return name.removeprefix("Function ")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("2_d", "2d").replace("3_d", "3d")


def edges(node: Node) -> tuple[Edge, ...]:
    """Where a node's derivatives go."""
    return node.next_functions


def shape(edge: Edge) -> tuple[int, ...]:
    """The shape of the tensor an edge stands for."""
    return tuple(edge[0]._input_metadata[edge[1]].shape) if edge[0] is not None else ()


# What only moves numbers where it leaves as many as there were, and where it leaves the size as it was.
OF_ALL = frozenset("Mean Sum Nansum Slice Select Expand Im2Col Col2Im Stack".split())
_OTHERS = MOVING | WINNING | POOLING | SIGNED
RESIZING = frozenset(kind for kind in _OTHERS if kind.startswith(("Adaptive", "Upsample")))
POOLS = frozenset(kind for kind in _OTHERS if kind.startswith(("AvgPool", "MaxPool")))
SCALES = ("scales", "scales_d", "scales_h", "scales_w")
MAY_MOVE = OF_ALL | RESIZING | POOLS | {"Mul", "Div", "Cat", "GridSampler2D", "GridSampler3D"}


def signs(node: Node) -> tuple[float, float]:
    """What a sum multiplies its two operands by."""
    alpha = getattr(node, "_saved_alpha", 1)
    return {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1)}[kind(node)]


def signed(dim: int) -> int:
    """A dimension that autograd saved; it knows no negative ones."""
    return dim - 2**64 if dim >= 2**63 else dim


def only_moves(node: Node) -> bool:
    """Whether what could compute only moves numbers here: every sum has one, all of a tensor is cut out, times one."""
    what = kind(node)
    if what not in MAY_MOVE:
        return False
    if what in ("Mul", "Div"):
        other = 0 if any(below is not None for below, _ in edges(node)[1:]) else node._saved_other
        return bool(other == 1) if isinstance(other, int | float) or other.numel() == 1 else False
    if what in POOLS:
        return math.prod(node._saved_kernel_size) == 1 and getattr(node, "_saved_divisor_override", None) in (None, 1)
    if what.startswith("GridSampler"):
        return node._saved_interpolation_mode == 1  # the nearest
    if what in RESIZING and math.prod(shape(edges(node)[0])[2:]) == 1:
        return True  # one pixel is repeated
    if what in RESIZING and any(getattr(node, f"_saved_{name}", None) not in (None, 1) for name in SCALES):
        return False  # bicubic resizing shifts numbers even where rounding leaves the size
    if what in ("Im2Col", "Col2Im") and not _tiles(node):
        return False
    before, after = shape(edges(node)[0]), shape((node, 0))
    return before == after or (what in OF_ALL and math.prod(before) == math.prod(after))


def _tiles(node: Node) -> bool:
    """Whether patches lie side by side."""
    aside = [*node._saved_padding, *(d - 1 for d in node._saved_dilation)]
    return node._saved_kernel_size == node._saved_stride and not any(aside)


def source(edge: Edge, through: frozenset[str] = SAME) -> Edge:
    """The edge behind nodes of these kinds, which have one operand."""
    return descend(edge, through)[1]


def descend(edge: Edge, through: frozenset[str] = PERMUTING) -> tuple[list[Node], Edge]:
    """The nodes of these kinds behind an edge, those aside that change nothing, and the edge behind them."""
    path: list[Node] = []
    reshaped = not PERMUTING.isdisjoint(through - SAME)
    while edge[0] is not None:
        node, what = edge[0], kind(edge[0])
        at = edge[1] if what == "Identity" else 0
        if what == "CopySlices" and len(edges(node)) == 2 and edges(node)[0][0] is None:
            at = 1  # written into memory that held nothing
        elif what not in through and not only_moves(node):
            break
        before, after = shape(edges(node)[at]), shape((node, 0))
        if what not in through and (math.prod(before) != math.prod(after) or not (before == after or reshaped)):
            break
        path += [] if what in SAME or (before == after and what not in PERMUTING) else [node]
        edge = edges(node)[at]
    return path, edge
