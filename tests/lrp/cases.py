"""Operations and small networks that several tests put through the engine, and their programs for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrp.reference import (
    Act,
    Add,
    Lin,
    MatMul,
    MaxPool,
    Move,
    Mul,
    Norm,
    Normalise,
    Offset,
    Program,
    Relu,
    Scale,
    Softmax,
    Step,
    chain,
    images,
)

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


SIZE = {1: (8,), 2: (6, 6), 3: (4, 4, 3)}


def sandwich(*middle: Step, dims: int = 2, signed: bool = False) -> Program:
    """The steps between a convolution (with ReLU, or without: `signed`) and ReLU, convolution, ReLU, dense layer."""
    conv = CONV[dims]
    stem: list[Step] = [Lin(conv(2, 4, 3, padding=1))] + ([] if signed else [Relu()])
    with torch.no_grad():
        y = chain(*stem, *middle).double()(images(1, 2, *SIZE[dims]))
        tail: list[Step] = [Relu(), Lin(CONV[y.ndim - 2](y.shape[1], 3, 1)), Relu(), Move(nn.Flatten())]
        width = chain(*tail).double()(y).shape[1]
    return chain(*stem, *middle, *tail, Lin(nn.Linear(width, 3)))


def residual() -> Program:
    return Program(
        [
            (Lin(nn.Conv2d(2, 4, 3, padding=1)), (0,)),
            (Norm(nn.BatchNorm2d(4)), (1,)),
            (Relu(nn.ReLU(inplace=True), in_place=True), (2,)),
            (MaxPool(nn.MaxPool2d(3, 2, 1)), (3,)),
            (Lin(nn.Conv2d(4, 4, 3, padding=1)), (4,)),
            (Norm(nn.BatchNorm2d(4)), (5,)),
            (Add(iadd, in_place=True), (6, 4)),
            (Relu(nn.ReLU(inplace=True), in_place=True), (7,)),
            (Lin(nn.AdaptiveAvgPool2d(1), weighted=False), (8,)),
            (Move(nn.Flatten()), (9,)),
            (Lin(nn.Linear(4, 3)), (10,)),
        ]
    ).eval()


def iadd(a: Tensor, b: Tensor) -> Tensor:
    a += b
    return a


LINEAR = {
    "conv2d": (2, partial(nn.Conv2d, 4, 5, 3, padding=1)),
    "conv2d without bias": (2, partial(nn.Conv2d, 4, 5, 3, padding=1, bias=False)),
    "conv2d 1x1": (2, partial(nn.Conv2d, 4, 5, 1)),
    "conv2d strided": (2, partial(nn.Conv2d, 4, 5, 3, stride=2, padding=1)),
    "conv2d strided, last rows unread": (2, partial(nn.Conv2d, 4, 5, 2, stride=(4, 3))),
    "conv2d dilated": (2, partial(nn.Conv2d, 4, 5, 3, dilation=2, padding=(1, 2))),
    "conv2d grouped": (2, partial(nn.Conv2d, 4, 6, 3, padding=1, groups=2)),
    "conv2d depthwise": (2, partial(nn.Conv2d, 4, 8, 3, padding=1, groups=4)),
    "conv2d rectangular": (2, partial(nn.Conv2d, 4, 3, (1, 4), stride=(2, 1), padding=(0, 2))),
    "conv2d same, odd": (2, partial(nn.Conv2d, 4, 5, 3, padding="same")),
    "conv2d same, even": (2, partial(nn.Conv2d, 4, 5, (2, 4), padding="same")),
    "conv2d same, even, dilated": (2, partial(nn.Conv2d, 4, 5, (2, 3), dilation=(3, 2), padding="same")),
    "conv2d valid": (2, partial(nn.Conv2d, 4, 5, 3, padding="valid")),
    "conv1d": (1, partial(nn.Conv1d, 4, 5, 3, padding=1)),
    "conv1d strided grouped dilated": (1, partial(nn.Conv1d, 4, 6, 3, stride=2, dilation=2, groups=2, padding=2)),
    "conv1d same, even": (1, partial(nn.Conv1d, 4, 5, 4, padding="same")),
    "conv3d": (3, partial(nn.Conv3d, 4, 3, 3, padding=1)),
    "conv3d strided grouped": (3, partial(nn.Conv3d, 4, 4, (2, 3, 1), stride=(1, 2, 1), groups=2, padding=(1, 1, 0))),
    "conv3d same, even": (3, partial(nn.Conv3d, 4, 2, (2, 1, 3), padding="same")),
    "transposed 2d": (2, partial(nn.ConvTranspose2d, 4, 3, 3, stride=2, padding=1)),
    "transposed 2d, grouped, output_padding": (
        2,
        partial(nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
    ),
    "transposed 2d, dilated": (2, partial(nn.ConvTranspose2d, 4, 3, 2, dilation=2, padding=(1, 0), bias=False)),
    "transposed 1d, grouped, output_padding": (
        1,
        partial(nn.ConvTranspose1d, 4, 4, 4, stride=3, output_padding=2, groups=2),
    ),
    "transposed 3d": (3, partial(nn.ConvTranspose3d, 4, 2, 2, stride=(1, 2, 1), output_padding=(0, 1, 0))),
}


POOLS = {
    "max": (2, partial(nn.MaxPool2d, 2)),
    "max, overlapping": (2, partial(nn.MaxPool2d, 3, 2, 1)),
    "max, very overlapping": (2, partial(nn.MaxPool2d, 3, 1)),
    "max, ceil_mode": (2, partial(nn.MaxPool2d, 4, 3, ceil_mode=True)),
    "max, dilated": (2, partial(nn.MaxPool2d, 2, 1, dilation=2)),
    "max 1d": (1, partial(nn.MaxPool1d, 3, 2)),
    "max 3d": (3, partial(nn.MaxPool3d, 2, 1)),
    "adaptive max": (2, partial(nn.AdaptiveMaxPool2d, 4)),
    "adaptive max 1d": (1, partial(nn.AdaptiveMaxPool1d, 3)),
    "adaptive max 3d": (3, partial(nn.AdaptiveMaxPool3d, 2)),
    "nearest": (2, partial(nn.Upsample, scale_factor=2)),
    "nearest-exact": (2, partial(nn.Upsample, size=4, mode="nearest-exact")),
}


MEANS = {
    "average": (2, partial(nn.AvgPool2d, 2)),
    "average, overlapping": (2, partial(nn.AvgPool2d, 3, 2, 1)),
    "average, ceil_mode": (2, partial(nn.AvgPool2d, 4, 3, ceil_mode=True)),
    "average, padding not counted": (2, partial(nn.AvgPool2d, 3, 2, 1, count_include_pad=False, ceil_mode=True)),
    "average 1d": (1, partial(nn.AvgPool1d, 3, 2, 1)),
    "average 3d": (3, partial(nn.AvgPool3d, 2, 1)),
    "adaptive average": (2, partial(nn.AdaptiveAvgPool2d, 1)),
    "adaptive average, uneven windows": (2, partial(nn.AdaptiveAvgPool2d, 4)),
    "adaptive average 1d": (1, partial(nn.AdaptiveAvgPool1d, 3)),
    "adaptive average 3d": (3, partial(nn.AdaptiveAvgPool3d, (3, 2, 1))),
    "mean over columns": (2, lambda: lambda t: t.mean(3)),
    "mean over channels": (2, lambda: lambda t: torch.mean(t, dim=1, keepdim=True)),
    "sum over rows": (2, lambda: lambda t: t.sum(dim=-2)),
    "bilinear": (2, partial(nn.Upsample, scale_factor=1.5, mode="bilinear")),
    "interpolate, corners aligned": (
        2,
        lambda: partial(F.interpolate, size=(4, 9), mode="bilinear", align_corners=True),
    ),
    "linear 1d": (1, partial(nn.Upsample, size=11, mode="linear")),
    "trilinear": (3, partial(nn.Upsample, size=5, mode="trilinear")),
}


ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "leaky": nn.LeakyReLU(0.1),
    "elu": nn.ELU(),
    "celu": nn.CELU(0.7),
    "selu": nn.SELU(),
    "mish": nn.Mish(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardtanh": nn.Hardtanh(-0.5, 0.5),
    "relu6": nn.ReLU6(),
    "softplus": nn.Softplus(),
    "softsign": nn.Softsign(),
    "tanhshrink": nn.Tanhshrink(),
    "clamped": lambda t: t.clamp(-0.3, 0.4),
    "F.silu": F.silu,
    "F.gelu": F.gelu,
    "torch.tanh": torch.tanh,
    "method tanh": lambda t: t.tanh(),
}


IN_PLACE = {
    "silu": (nn.SiLU(inplace=True), F.silu),
    "hardswish": (nn.Hardswish(inplace=True), F.hardswish),
    "leaky": (nn.LeakyReLU(0.1, inplace=True), partial(F.leaky_relu, negative_slope=0.1)),
    "elu": (nn.ELU(inplace=True), F.elu),
    "relu6": (nn.ReLU6(inplace=True), F.relu6),
    "tanh_": (lambda t: t.tanh_(), torch.tanh),
    "sigmoid_": (lambda t: t.sigmoid_(), torch.sigmoid),
}


def grouped_mean(x: Tensor, groups: int) -> Tensor:
    mean = x.reshape(x.shape[0], groups, -1).mean(-1)
    return mean.repeat_interleave(x[0].numel() // groups, 1).view_as(x)


def grouped_norm(module: nn.Module, groups: int) -> Normalise:
    def inverse(x: Tensor) -> Tensor:
        return 1 / (grouped_mean((x - grouped_mean(x, groups)) ** 2, groups) + module.eps).sqrt()

    def formula(x: Tensor, inverse: Tensor) -> Tensor:
        y = (x - grouped_mean(x, groups)) * inverse
        if module.weight is None:
            return y
        shape = (-1, *[1] * (x.ndim - 2))
        return y * module.weight.view(shape) + module.bias.view(shape)

    return Normalise(module, inverse, formula)


def last_dims_norm(module: nn.Module, dims: int, centred: bool = True) -> Normalise:
    """Over the last dimensions; an RMS norm subtracts no mean."""
    over = tuple(range(-dims, 0))
    eps = module.eps if module.eps is not None else torch.finfo(torch.float64).eps

    def centre(x: Tensor) -> Tensor:
        return x - x.mean(over, keepdim=True) if centred else x

    def inverse(x: Tensor) -> Tensor:
        return 1 / ((centre(x) ** 2).mean(over, keepdim=True) + eps).sqrt()

    def formula(x: Tensor, inverse: Tensor) -> Tensor:
        y = centre(x) * inverse
        if module.weight is not None:
            y = y * module.weight
        return y if getattr(module, "bias", None) is None else y + module.bias

    return Normalise(module, inverse, formula)


OTHER_NORMS = {
    "layer": lambda: last_dims_norm(nn.LayerNorm(6), 1),
    "layer, several dimensions": lambda: last_dims_norm(nn.LayerNorm((4, 6, 6)), 3),
    "layer, no affine": lambda: last_dims_norm(nn.LayerNorm((6, 6), elementwise_affine=False), 2),
    "layer, no bias": lambda: last_dims_norm(nn.LayerNorm(6, bias=False, eps=0.1), 1),
    "group": lambda: grouped_norm(nn.GroupNorm(2, 4), 2),
    "one group": lambda: grouped_norm(nn.GroupNorm(1, 4, affine=False), 1),
    "instance": lambda: grouped_norm(nn.InstanceNorm2d(4), 4),
    "instance, affine": lambda: grouped_norm(nn.InstanceNorm2d(4, affine=True), 4),
    "rms": lambda: last_dims_norm(nn.RMSNorm(6), 1, centred=False),
    "rms, no affine": lambda: last_dims_norm(nn.RMSNorm((6, 6), eps=1e-3, elementwise_affine=False), 2, centred=False),
}


class Excited(nn.Module):
    """Squeeze-and-excitation as people write it; `oracle` is the same as a program."""

    def __init__(self, gate: Callable[[Tensor], Tensor], in_place: bool) -> None:
        super().__init__()
        self.stem, self.down, self.up = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)
        self.head = nn.Linear(64, 3)
        self.gate, self.in_place = gate, in_place

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        scale = self.gate(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))
        if self.in_place:
            x = x.clone()
            x *= scale
        else:
            x = scale * x
        return self.head(x.flatten(1))

    def program(self) -> Program:
        return Program(
            [
                (Lin(self.stem), (0,)),
                (Act(F.silu), (1,)),
                (Lin(lambda t: t.mean((2, 3), keepdim=True), weighted=False), (2,)),
                (Lin(self.down), (3,)),
                (Relu(), (4,)),
                (Lin(self.up), (5,)),
                (Act(self.gate), (6,)),
                (Mul(gated=True), (2, 7)),
                (Move(nn.Flatten()), (8,)),
                (Lin(self.head), (9,)),
            ]
        )


WIDTH, HEADS, TOKENS = 6, 2, 4


class Attention(nn.Module):
    """Patches, self-attention, a residual sum, a mean over tokens, a dense layer; the attention in four spellings."""

    def __init__(self, spelling: str, mask: Tensor | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, WIDTH, 3, stride=3)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)
        self.spelling, self.mask = spelling, mask

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        mixed = self.mixed(tokens)
        return self.head((tokens + mixed).mean(1))

    def mixed(self, t: Tensor) -> Tensor:
        a = self.attention
        if self.spelling.startswith("module"):
            mask = None if self.mask is None else ~self.mask
            return a(t, t, t, need_weights="weights" in self.spelling, attn_mask=mask)[0]
        q, k, v = F.linear(t, a.in_proj_weight, a.in_proj_bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.spelling == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        elif self.spelling == "causal sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q * (WIDTH // HEADS) ** -0.5) @ k.transpose(-2, -1)
            if self.mask is not None:
                scores = scores.masked_fill(~self.mask, -torch.inf)
            y = scores.softmax(-1) @ v
        return a.out_proj(y.transpose(1, 2).flatten(2))

    def program(self) -> Program:
        """q, k and v are three dense layers here, and the mask is a sum."""
        a = self.attention

        def projected(i: int) -> Step:
            weight, bias = a.in_proj_weight.chunk(3)[i], a.in_proj_bias.chunk(3)[i]
            return Lin(lambda t: F.linear(t, weight, bias).unflatten(-1, (HEADS, -1)).transpose(1, 2), True)

        blocked = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
        if self.mask is not None:
            blocked = blocked.masked_fill(~self.mask, -1e30)
        return Program(
            [
                (Lin(self.stem), (0,)),
                (Move(lambda t: t.flatten(2).transpose(1, 2)), (1,)),
                (projected(0), (2,)),
                (projected(1), (2,)),
                (projected(2), (2,)),
                (Move(lambda t: t.transpose(-2, -1)), (4,)),
                (MatMul(), (3, 6)),
                (Scale((WIDTH // HEADS) ** -0.5), (7,)),
                (Offset(blocked), (8,)),
                (Softmax(), (9,)),
                (MatMul(), (10, 5)),
                (Move(lambda t: t.transpose(1, 2).flatten(2)), (11,)),
                (Lin(a.out_proj), (12,)),
                (Add(), (2, 13)),
                (Lin(lambda t: t.mean(1), weighted=False), (14,)),
                (Lin(self.head), (15,)),
            ]
        )


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


class StandardisedConv(nn.Conv2d):
    """Its weight is computed on the fly from its parameter."""

    def standardised(self) -> Tensor:
        mean, var = self.weight.mean((1, 2, 3), keepdim=True), self.weight.var((1, 2, 3), unbiased=False, keepdim=True)
        return (self.weight - mean) / (var + 1e-5).sqrt() * 0.4

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.standardised(), self.bias, padding=1)
