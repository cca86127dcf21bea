"""Every rule on every operation against dense matrices and explicit loops, in double precision, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fasterisnet
from fasterisnet.lrp.targets import AllLogits, Joint
from lrp.cases import (
    ACTIVATIONS,
    CAUSAL,
    IN_PLACE,
    LINEAR,
    MEANS,
    OTHER_NORMS,
    POOLS,
    SIZE,
    Attention,
    Excited,
    StandardisedConv,
    grouped_norm,
    iadd,
    residual,
    sandwich,
)
from lrp.reference import (
    Act,
    Add,
    Cat,
    Dropout,
    Lin,
    MaxPool,
    Move,
    Mul,
    Norm,
    Offset,
    Oracle,
    Program,
    Relu,
    Scale,
    Step,
    assert_same,
    chain,
    dense_zb,
    dense_zplus,
    expected,
    explain_class,
    images,
    one_hot,
    randomise,
)

RULES = ("epsilon", "zplus", "gamma", "gradient")
TWO_RULES = ("epsilon", "zplus")  # where gamma and the gradient go the way of epsilon
CLASSES = [2, 0]


def compare(program: Program, x: Tensor, rule: str, seed: int = 0, **settings: object) -> None:
    """Engine and oracle agree on the map of one logit a sample."""
    randomise(program, seed)
    start = one_hot(CLASSES, 3)
    assert_same(explain_class(program, x, CLASSES, rule, **settings), expected(program, x, start, rule, **settings))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", LINEAR)
def test_convolutions(case: str, rule: str, signed: bool) -> None:
    dims, make = LINEAR[case]
    compare(sandwich(Lin(make()), dims=dims, signed=signed), images(2, 2, *SIZE[dims]), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_convolutions_that_pad_by_copying(mode: str, rule: str) -> None:
    """The module pads, then convolves; every copy of a pixel brings its relevance home."""
    stem, conv, head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 3, padding=(1, 2), padding_mode=mode), nn.Linear(120, 3)
    model = randomise(nn.Sequential(stem, nn.ReLU(), conv, nn.ReLU(), nn.Flatten(), head), 0)
    program = chain(
        Lin(stem), Relu(), Move(lambda t: F.pad(t, (2, 2, 1, 1), mode)),
        Lin(lambda t: F.conv2d(t, conv.weight, conv.bias), True), Relu(), Move(nn.Flatten()), Lin(head),
    )  # fmt: skip
    x = images(2, 2, 6, 6)
    assert_same(explain_class(model, x, CLASSES, rule), expected(program, x, one_hot(CLASSES, 3), rule))


def test_a_basis_finds_the_matrix_of_a_convolution() -> None:
    """The oracle's way to a matrix against nested loops, so that the oracle itself stands on something."""
    conv = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 1), dilation=(1, 2), groups=2).double()
    matrix, bias = Lin(conv).matrix(torch.zeros(1, 4, 5, 6, dtype=torch.float64))
    loops = conv_matrix(conv, 5, 6)
    assert torch.equal(matrix != 0, loops != 0)
    assert_same(matrix, loops, 1e-14)
    assert torch.equal(bias, conv.bias.repeat_interleave(matrix.shape[0] // 6))


def conv_matrix(conv: nn.Conv2d, height: int, width: int) -> Tensor:
    """A convolution's matrix, entry by entry."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    out_h = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1
    out_w = (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    out_c, per_group = conv.out_channels, conv.in_channels // conv.groups
    matrix = torch.zeros(out_c, out_h, out_w, conv.in_channels, height, width, dtype=torch.float64)
    for o in range(out_c):
        first = o // (out_c // conv.groups) * per_group
        for i in range(out_h):
            for j in range(out_w):
                for c in range(per_group):
                    for a in range(kh):
                        for b in range(kw):
                            row, column = i * sh - ph + a * dh, j * sw - pw + b * dw
                            if 0 <= row < height and 0 <= column < width:
                                matrix[o, i, j, first + c, row, column] = conv.weight[o, c, a, b].item()
    return matrix.view(out_c * out_h * out_w, -1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("signed", [False, True])
def test_dense_layers(rule: str, signed: bool) -> None:
    middle: list[Step] = [Lin(nn.Linear(12, 7))] + ([] if signed else [Relu()])
    program = chain(
        *middle, Lin(nn.Linear(7, 6)), Relu(), Lin(nn.Linear(6, 5, bias=False)), Relu(), Lin(nn.Linear(5, 3))
    )
    compare(program, images(2, 12), rule)


@pytest.mark.parametrize("rule", RULES)
def test_dense_layers_over_tokens(rule: str) -> None:
    program = chain(Lin(nn.Linear(6, 5)), Lin(nn.Linear(5, 4)), Relu(), Move(nn.Flatten()), Lin(nn.Linear(16, 3)))
    compare(program, images(2, 4, 6), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "spelling",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.matmul(x, w),
        lambda x, w: x.mm(w),
        lambda x, w: F.linear(x, w.t()),
        lambda x, w: torch.addmm(torch.zeros(5, dtype=torch.float64), x, w),
        lambda x, w: (w.t() @ x.t()).t(),
    ],
)
def test_products_with_a_parameter_are_dense_layers(spelling: Callable[[Tensor, Tensor], Tensor], rule: str) -> None:
    weight = nn.Parameter(torch.zeros(6, 5))
    program = chain(Lin(nn.Linear(8, 6)), Lin(lambda x: spelling(x, weight), True), Relu(), Lin(nn.Linear(5, 3)))
    program.weight = weight
    compare(program, images(2, 8), rule)


# --- batch norm -----------------------------------------------------------------------------------------------------


def without_bias(channels: int) -> nn.Module:
    module = nn.BatchNorm2d(channels)
    module.bias = None
    return module


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "affine": nn.BatchNorm2d,
    "without affine": partial(nn.BatchNorm2d, affine=False),
    "without bias": without_bias,
    "without running statistics": partial(nn.BatchNorm2d, track_running_stats=False),
    "own eps": partial(nn.BatchNorm2d, eps=0.1, momentum=None),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("relu", [True, False])
def test_batch_norm_behind_a_convolution(norm: str, training: bool, relu: bool, rule: str) -> None:
    flatten = Move(nn.Flatten())
    steps: list[Step] = [Lin(nn.Conv2d(2, 4, 3, padding=1)), Norm(NORMS[norm](4))]
    steps += [Relu(nn.ReLU(inplace=True), in_place=True)] if relu else []
    steps += [Lin(nn.Conv2d(4, 3, 3, bias=False)), Norm(NORMS[norm](3)), flatten]
    program = chain(*steps, Lin(nn.Linear(27, 3))).train(training)
    compare(program, images(2, 2, 5, 5), rule)


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("relu", [True, False])
def test_batch_norm_behind_a_concat(norm: str, training: bool, relu: bool, rule: str) -> None:
    """Nothing to fuse it with: under z+ it is a diagonal layer of its own, on values of either sign."""
    program = Program(
        [
            (Lin(nn.Conv2d(2, 3, 3, padding=1)), (0,)),
            (Relu(), (1,)),
            (Lin(nn.Conv2d(3, 2, 1)), (2,)),
            (Cat(), (2, 3)),
            (Norm(NORMS[norm](5)), (4,)),
            (Relu() if relu else Scale(1.0), (5,)),
            (Lin(nn.Conv2d(5, 3, 3)), (6,)),
            (Relu(), (7,)),
            (Move(nn.Flatten()), (8,)),
            (Lin(nn.Linear(27, 3)), (9,)),
        ]
    )
    compare(program.train(training), images(2, 2, 5, 5), rule)


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("dims", "layer", "norm"), [
    (0, partial(nn.Linear, 8, 5), nn.BatchNorm1d),
    (1, partial(nn.Conv1d, 2, 5, 3), nn.BatchNorm1d),
    (2, partial(nn.ConvTranspose2d, 2, 5, 3, stride=2), nn.BatchNorm2d),
    (3, partial(nn.Conv3d, 2, 5, 2), nn.BatchNorm3d),
])  # fmt: skip
def test_batch_norm_of_every_dimension(
    dims: int, layer: Callable[[], nn.Module], norm: Callable[[int], nn.Module], training: bool, rule: str
) -> None:
    shape = (3, 2, *SIZE[dims]) if dims else (3, 8)
    steps = [Lin(layer()), Norm(norm(5)), Relu(), Move(nn.Flatten())]
    width = chain(*steps).double()(images(*shape)).shape[1]
    program = chain(*steps, Lin(nn.Linear(width, 3))).train(training)
    randomise(program, 3)
    x, classes = images(*shape), [2, 0, 1]
    assert_same(explain_class(program, x, classes, rule), expected(program, x, one_hot(classes, 3), rule))


@pytest.mark.parametrize("rule", RULES)
def test_batch_norm_behind_a_grouped_transposed_convolution(rule: str) -> None:
    """Its weight has the output channels spread over groups: fusing has to scale the right ones."""
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    compare(sandwich(Lin(layer), Norm(nn.BatchNorm2d(6)), signed=True).eval(), images(2, 2, 6, 6), rule)


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
def test_in_train_mode_a_map_does_not_depend_on_the_class_of_another_sample(rule: str) -> None:
    program = sandwich(Lin(nn.Conv2d(4, 5, 3)), Norm(nn.BatchNorm2d(5)), Relu(), Norm(nn.BatchNorm2d(5))).train()
    randomise(program, 1)
    x = images(2, 2, 6, 6)
    assert torch.equal(explain_class(program, x, [1, 0], rule)[0], explain_class(program, x, [1, 2], rule)[0])


@pytest.mark.parametrize("rule", RULES)
def test_batch_norm_as_the_last_operation(rule: str) -> None:
    """Fused with the dense layer that it follows, it makes the logits: z+ starts from its z."""
    program = chain(Lin(nn.Linear(8, 6)), Relu(), Lin(nn.Linear(6, 3)), Norm(nn.BatchNorm1d(3))).eval()
    compare(program, images(2, 8), rule)


# --- pooling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("case", POOLS)
def test_max_pooling(case: str, rule: str, signed: bool) -> None:
    dims, make = POOLS[case]
    compare(sandwich(MaxPool(make()), dims=dims, signed=signed), images(2, 2, *SIZE[dims]), rule)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("case", MEANS)
def test_average_pooling_and_upsampling(case: str, rule: str, signed: bool) -> None:
    dims, make = MEANS[case]
    compare(sandwich(Lin(make(), weighted=False), dims=dims, signed=signed), images(2, 2, *SIZE[dims]), rule)


@pytest.mark.parametrize("rule", RULES)
def test_average_pooling_that_makes_the_logits(rule: str) -> None:
    """A fully convolutional net: under z+ the pooling takes its own z, as every operation that made the logits."""
    program = chain(
        Lin(nn.Conv2d(2, 4, 3)), Relu(), Lin(nn.Conv2d(4, 3, 3)), Lin(nn.AdaptiveAvgPool2d(1), weighted=False),
        Move(nn.Flatten()),
    )  # fmt: skip
    x = images(2, 2, 9, 9, seed=1)
    compare(program, x, rule)
    scores = nn.Sequential(*program.steps[:3])(x)[range(2), CLASSES]
    assert (scores > 0).any() and (scores < 0).any(), "z is no other than the logit"


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
def test_a_sum_that_makes_the_logits(rule: str) -> None:
    program = Program(
        [
            (Lin(nn.Linear(6, 5)), (0,)),
            (Relu(), (1,)),
            (Lin(nn.Linear(5, 3)), (2,)),
            (Lin(nn.Linear(5, 3, bias=False)), (2,)),
            (Add(), (3, 4)),
        ]
    )
    compare(program, images(2, 6), rule)


# --- sums and concatenation -----------------------------------------------------------------------------------------


def isub(a: Tensor, b: Tensor) -> Tensor:
    a -= b
    return a


SUMS = {
    "+": Add(lambda a, b: a + b),
    "+=": Add(iadd, in_place=True),
    "torch.add": Add(torch.add),
    "torch.add, alpha": Add(lambda a, b: torch.add(a, b, alpha=0.6), alpha=0.6),
    "torch.add, negative alpha": Add(lambda a, b: torch.add(a, b, alpha=-0.6), alpha=-0.6),
    "method": Add(lambda a, b: a.add(b)),
    "method in place, alpha": Add(lambda a, b: a.add_(b, alpha=1.5), alpha=1.5, in_place=True),
    "-": Add(lambda a, b: a - b, alpha=-1.0),
    "-=": Add(isub, alpha=-1.0, in_place=True),
    "torch.sub, alpha": Add(lambda a, b: torch.sub(a, b, alpha=0.5), alpha=-0.5),
    "sum of a list": Add(lambda a, b: sum([a, b])),
    "functional wrapper": Add(torch.ao.nn.quantized.FloatFunctional().add),
}


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", SUMS)
def test_residual_sums(spelling: str, rule: str, signed: bool) -> None:
    """Two branches of either sign, or both behind ReLU, then ReLU, in place where the sum was."""
    add = SUMS[spelling]
    behind = (lambda: Scale(1.0)) if signed else Relu
    program = Program(
        [
            (Lin(nn.Conv2d(2, 4, 3, padding=1)), (0,)),
            (Relu(), (1,)),
            (Lin(nn.Conv2d(4, 4, 3, padding=1)), (2,)),
            (behind(), (3,)),
            (Lin(nn.Conv2d(4, 4, 1)), (2,)),
            (behind(), (5,)),
            (Scale(1.0), (4,)),
            (add, (7, 6)),
            (Relu(), (8,)),
            (Move(nn.Flatten()), (9,)),
            (Lin(nn.Linear(100, 3)), (10,)),
        ]
    )
    compare(program, images(2, 2, 5, 5), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("behind_norm", [True, False])
def test_in_place_sum_on_a_layer_output(rule: str, behind_norm: bool) -> None:
    """`out += identity; relu_(out)` as in torchvision's blocks: the layer's own output is overwritten twice."""
    program = Program(
        [
            (Lin(nn.Conv2d(2, 4, 3, padding=1)), (0,)),
            (Relu(nn.ReLU(inplace=True), in_place=True), (1,)),
            (Lin(nn.Conv2d(4, 4, 3, padding=1)), (2,)),
            (Norm(nn.BatchNorm2d(4)) if behind_norm else Scale(1.0), (3,)),
            (Add(iadd, in_place=True), (4, 2)),
            (Relu(torch.relu_, in_place=True), (5,)),
            (Move(nn.Flatten()), (6,)),
            (Lin(nn.Linear(100, 3)), (7,)),
        ]
    )
    compare(program.eval(), images(2, 2, 5, 5), rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_summand_overwritten_after_the_sum(rule: str) -> None:
    """torch allows it, since a sum keeps none of its operands: the rule must not read the new values."""
    program = Program(
        [
            (Lin(nn.Conv2d(2, 3, 3)), (0,)),
            (Lin(nn.Conv2d(2, 3, 3)), (0,)),
            (Add(), (1, 2)),
            (Add(iadd, in_place=True), (1, 3)),
            (Relu(torch.relu_, in_place=True), (2,)),
            (Cat(), (1, 2, 3)),
            (Relu(), (6,)),
            (Move(nn.Flatten()), (7,)),
            (Lin(nn.Linear(81, 3)), (8,)),
        ]
    )
    compare(program, images(2, 2, 5, 5), rule)


class OnSlices(nn.Module):
    """Steps on a part of a tensor, in place or spelled out."""

    def __init__(self, step: str, in_place: bool) -> None:
        super().__init__()
        self.stem, self.other, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 2, 3), nn.Linear(64, 3)
        self.step, self.in_place = step, in_place

    def forward(self, x: Tensor) -> Tensor:
        y, b = self.stem(x), self.other(x)
        if self.in_place:
            self.change(y[:, :2], b)
        else:
            y = torch.cat([self.changed(y[:, :2], b), y[:, 2:]], 1)
        return self.head(y.relu().flatten(1))

    def change(self, part: Tensor, b: Tensor) -> None:
        if self.step == "sum":
            part += b
        elif self.step == "relu":
            part.relu_()
        elif self.step == "silu":
            F.silu(part, inplace=True)
        elif self.step == "product":
            part *= b
        else:
            part[...] = b

    def changed(self, part: Tensor, b: Tensor) -> Tensor:
        return {"sum": part + b, "relu": part.relu(), "silu": F.silu(part), "product": part * b, "assignment": b}[
            self.step
        ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", ["sum", "relu", "silu", "product", "assignment"])
def test_in_place_steps_on_a_slice(step: str, rule: str) -> None:
    """The rest of the tensor keeps its relevance; same maps as with the parts put together."""
    model = randomise(OnSlices(step, in_place=False), 22)
    x = images(2, 2, 6, 6)
    wanted = explain_class(model, x, CLASSES, rule)
    model.in_place = True
    assert_same(explain_class(model, x, CLASSES, rule), wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("norm", [False, True])
def test_in_place_relu_on_a_view(rule: str, norm: bool) -> None:
    layers: list[Step] = [Lin(nn.Conv2d(4, 3, 1)), *([Norm(nn.BatchNorm2d(3))] if norm else []), Move(nn.Flatten())]
    program = chain(Lin(nn.Conv2d(2, 4, 3)), Relu(), *layers, Relu(torch.relu_, in_place=True), Lin(nn.Linear(48, 3)))
    compare(program.eval(), images(2, 2, 6, 6), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", [(2, 4), (4, 2)])
def test_broadcast_sums(rule: str, order: tuple[int, int]) -> None:
    program = Program(
        [
            (Lin(nn.Conv2d(2, 4, 3, padding=1)), (0,)),
            (Relu(), (1,)),
            (Lin(nn.AdaptiveAvgPool2d(1), weighted=False), (2,)),
            (Lin(nn.Conv2d(4, 4, 1)), (3,)),
            (Add(lambda a, b: a + b), order),
            (Relu(), (5,)),
            (Move(nn.Flatten()), (6,)),
            (Lin(nn.Linear(100, 3)), (7,)),
        ]
    )
    compare(program, images(2, 2, 5, 5), rule)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_in_a_sum_takes_part_and_gets_nothing(rule: str, signed: bool) -> None:
    compare(sandwich(Offset(images(4, 6, 6, seed=5)), signed=signed), images(2, 2, 6, 6), rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dim", [1, 2])
def test_concatenation(rule: str, dim: int) -> None:
    """Of signed and rectified parts, one of them twice."""
    program = Program(
        [
            (Lin(nn.Conv2d(2, 3, 3, padding=1)), (0,)),
            (Relu(), (1,)),
            (Lin(nn.Conv2d(3, 3, 3, padding=1)), (2,)),
            (Cat(dim), (2, 3, 2)),
            (Lin(nn.Conv2d(9 if dim == 1 else 3, 4, 3)), (4,)),
            (Relu(), (5,)),
            (Move(nn.Flatten()), (6,)),
            (Lin(nn.LazyLinear(3)), (7,)),
        ]
    ).double()
    program(images(1, 2, 5, 5))
    compare(program, images(2, 2, 5, 5), rule)


MOVES = {
    "slice": lambda t: t[:, 1:, ::2],
    "chunk": lambda t: t.chunk(2, 1)[1],
    "permute": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "transpose": lambda t: t.mT,
    "channel shuffle": nn.ChannelShuffle(2),
    "pixel shuffle": nn.PixelShuffle(2),
    "pixel unshuffle": nn.PixelUnshuffle(2),
    "pad": lambda t: F.pad(t, (1, 0, 2, 1)),
    "reflect": nn.ReflectionPad2d(1),
    "crop": lambda t: F.pad(t, (-1, -1)),
    "roll": lambda t: torch.roll(t, (1, 2), (2, 3)),
    "flip": lambda t: t.flip(3),
    "repeat": lambda t: t.repeat(1, 2, 1, 1),
    "stack": lambda t: torch.stack([t[:, 0], t[:, 2]], 1),
    "expand": lambda t: t[:, :1].expand(-1, 3, -1, -1),
    "identity": nn.Identity(),
}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("case", MOVES)
def test_rearrangements(case: str, rule: str, signed: bool) -> None:
    compare(sandwich(Move(MOVES[case]), signed=signed), images(2, 2, 6, 6), rule)


@pytest.mark.parametrize("rule", TWO_RULES)
@pytest.mark.parametrize("dropout", [nn.Dropout(0.4), nn.Dropout2d(0.4), partial(F.dropout, p=0.4)])
def test_dropout_in_train_mode(dropout: Callable[[Tensor], Tensor], rule: str) -> None:
    """The mask of the forward pass is the mask of the relevance."""
    program = randomise(sandwich(Dropout(dropout)).train(), 2)
    x, start = images(2, 2, 6, 6), one_hot(CLASSES, 3)
    torch.manual_seed(11)
    actual = explain_class(program, x, CLASSES, rule)
    torch.manual_seed(11)
    wanted = expected(program, x, start, rule)
    assert_same(actual, wanted)
    with torch.no_grad():
        assert (dropout(torch.ones(2, 4, 6, 6)) == 0).any(), "nothing was dropped"


# --- activations ----------------------------------------------------------------------------------------------------

SHARED = nn.ReLU()
SHARED_IN_PLACE = nn.ReLU(inplace=True)
RELUS = {
    "module": (nn.ReLU(), False),
    "module in place": (nn.ReLU(inplace=True), True),
    "F.relu": (F.relu, False),
    "F.relu in place": (partial(F.relu, inplace=True), True),
    "F.relu_": (F.relu_, True),
    "torch.relu": (torch.relu, False),
    "torch.relu_": (torch.relu_, True),
    "method": (lambda t: t.relu(), False),
    "method in place": (lambda t: t.relu_(), True),
    "clamp": (lambda t: t.clamp(min=0), False),
    "clamp positional": (lambda t: t.clamp(0), False),
    "torch.clamp": (lambda t: torch.clamp(t, min=0.0), False),
    "clamp_": (lambda t: t.clamp_(min=0), True),
    "clamp_min": (lambda t: t.clamp_min(0), False),
    "clip": (lambda t: t.clip(min=0), False),
    "threshold": (nn.Threshold(0.0, 0.0), False),
    "maximum": (lambda t: torch.maximum(t, torch.zeros((), dtype=t.dtype)), False),
    "re-used module": (SHARED, False),
    "re-used in place": (SHARED_IN_PLACE, True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spelling", RELUS)
def test_relu_in_all_spellings(spelling: str, rule: str) -> None:
    function, in_place = RELUS[spelling]

    def relu() -> Relu:
        return Relu(function, in_place)

    program = chain(
        Lin(nn.Conv2d(2, 4, 3)), relu(), Lin(nn.Conv2d(4, 4, 3)), Norm(nn.BatchNorm2d(4)), relu(),
        Move(lambda t: t.clone().flatten(1)), relu(), Lin(nn.Linear(16, 3)),
    )  # fmt: skip
    compare(program.eval(), images(2, 2, 6, 6), rule)


def activated(act: Callable[[], Step]) -> Program:
    return chain(
        Lin(nn.Conv2d(2, 4, 3)), act(), Lin(nn.Conv2d(4, 3, 3)), Norm(nn.BatchNorm2d(3)), act(),
        Move(lambda t: t.clone().flatten(1)), Lin(nn.Linear(12, 3)),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_other_activations(name: str, rule: str) -> None:
    """`G * f(x) / (x + eps*sign(x))`. (torch's own derivative of hardsigmoid rounds 1/6 to single precision.)"""
    program = randomise(activated(lambda: Act(ACTIVATIONS[name])), 0)
    x = 3 * images(2, 2, 6, 6)
    tolerance = 1e-7 if (name, rule) == ("hardsigmoid", "gradient") else 1e-10
    wanted = expected(program, x, one_hot(CLASSES, 3), rule)
    assert_same(explain_class(program, x, CLASSES, rule), wanted, tolerance)


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_other_activations_in_place(name: str, rule: str) -> None:
    function, plain = IN_PLACE[name]
    compare(activated(lambda: Act(function, plain, in_place=True)), 3 * images(2, 2, 6, 6), rule)


@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("slopes", [1, 3])
def test_prelu(slopes: int, rule: str) -> None:
    prelu = nn.PReLU(slopes)
    program = chain(Lin(nn.Conv2d(2, 3, 3)), Act(prelu), Move(nn.Flatten()), Lin(nn.Linear(48, 3)))
    compare(program, images(2, 2, 6, 6), rule)


def test_sign_of_zero_is_one() -> None:
    """At x = 0 a sigmoid is 0.5 and passes `G * 0.5 / eps`."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sigmoid(), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        model[2].weight.copy_(torch.tensor([[3.0, 1.0]]))
    x = torch.ones(1, 2, dtype=torch.float64)
    actual = explain_class(model, x, [0])
    assert_same(actual, 3.0 * 0.5 / 0.01 * torch.tensor([[1.0, -1.0]], dtype=torch.float64))


# --- other normalisations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("rule", ["epsilon", "gradient"])
@pytest.mark.parametrize("name", OTHER_NORMS)
def test_layer_group_instance_and_rms_norm(name: str, rule: str, signed: bool) -> None:
    program = randomise(sandwich(OTHER_NORMS[name](), signed=signed), 4)
    x = images(2, 2, 6, 6)
    torch.testing.assert_close(program(x), Oracle(program, x, one_hot(CLASSES, 3)).logits, rtol=1e-12, atol=1e-12)
    compare(program, x, rule, seed=4)


@pytest.mark.parametrize("training", [False, True])
def test_instance_norm_with_running_statistics(training: bool) -> None:
    """In eval mode it is affine with the running statistics, in train mode it measures each sample."""
    module = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    step = grouped_norm(module, 4) if training else Norm(module)
    compare(sandwich(step).train(training), images(2, 2, 6, 6), "epsilon")


# --- products, gates, attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("gate", [torch.sigmoid, F.hardsigmoid, nn.Sigmoid()])
def test_a_gate_is_a_constant(gate: Callable[[Tensor], Tensor], in_place: bool) -> None:
    model = randomise(Excited(gate, in_place), 5)
    x = images(2, 2, 6, 6)
    assert_same(explain_class(model, x, CLASSES), Oracle(model.program(), x, one_hot(CLASSES, 3)).input)


@pytest.mark.parametrize("same", [False, True])
def test_a_product_of_two_signals_gives_half_to_each(same: bool) -> None:
    program = Program(
        [
            (Lin(nn.Linear(6, 5)), (0,)),
            (Lin(nn.Linear(6, 5)), (0,)),
            (Act(torch.tanh), (2,)),
            (Mul(), (1, 1) if same else (1, 3)),
            (Lin(nn.Linear(5, 3)), (4,)),
        ]
    )
    compare(program, images(2, 6), "epsilon")


def test_a_square_is_a_product_with_itself() -> None:
    first, last = nn.Linear(6, 5), nn.Linear(5, 3)
    wanted = Program([(Lin(first), (0,)), (Mul(), (1, 1)), (Lin(last), (2,))])
    randomise(wanted, 6)
    x = images(2, 6)
    for spelling in (torch.square, lambda t: t**2, lambda t: t.pow(2)):
        model = chain(Lin(first), Act(spelling), Lin(last))
        assert_same(explain_class(model, x, CLASSES), Oracle(wanted, x, one_hot(CLASSES, 3)).input)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("spelling", "mask"),
    [
        ("by hand", None),
        ("by hand", CAUSAL),
        ("sdpa", None),
        ("sdpa", CAUSAL),
        ("causal sdpa", CAUSAL),
        ("module", None),
        ("module", CAUSAL),
        ("module with weights", None),
        ("module with weights", CAUSAL),
    ],
)
def test_attention(spelling: str, mask: Tensor | None, frozen: bool) -> None:
    """Half to each factor of both products, softmax ordinary, in every spelling, also with frozen parameters."""
    model = randomise(Attention(spelling, mask), 7).eval().requires_grad_(not frozen)
    x = images(2, 2, 6, 6)
    oracle = Oracle(model.program(), x, one_hot(CLASSES, 3))
    torch.testing.assert_close(model(x), oracle.logits, rtol=1e-12, atol=1e-12)
    assert_same(explain_class(model, x, CLASSES), oracle.input)


def test_attention_under_the_plain_gradient() -> None:
    model = randomise(Attention("module"), 7).eval()
    x = images(2, 2, 6, 6)
    assert_same(explain_class(model, x, CLASSES, "gradient"), expected(model, x, one_hot(CLASSES, 3), "gradient"))


@pytest.mark.parametrize("rule", RULES)
def test_weight_standardised_convolution(rule: str) -> None:
    program = sandwich(Lin(StandardisedConv(4, 5, 3)), Norm(nn.BatchNorm2d(5))).eval()
    compare(program, images(2, 2, 6, 6), rule)


@pytest.mark.parametrize("rule", RULES)
def test_parametrised_weights(rule: str) -> None:
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 5, 3))
    compare(sandwich(Lin(conv)), images(2, 2, 6, 6), rule)


# --- first layer: zB ------------------------------------------------------------------------------------------------

LOW, HIGH = torch.tensor([-0.4, -1.2], dtype=torch.float64), torch.tensor([1.5, 0.9], dtype=torch.float64)
BOXES = {
    "numbers": ((-1, 1.25), (torch.full((2, 1, 1), -1.0), torch.full((2, 1, 1), 1.25))),
    "per channel": ((LOW, HIGH), (LOW.view(2, 1, 1), HIGH.view(2, 1, 1))),
    "per channel, shaped": ((LOW.view(1, 2, 1, 1), HIGH.view(2, 1, 1)), (LOW.view(2, 1, 1), HIGH.view(2, 1, 1))),
    "from zero": ((0.0, 1.0), (torch.zeros(2, 1, 1), torch.ones(2, 1, 1))),
}
STEMS: dict[str, Callable[[], list[Step]]] = {
    "relu": lambda: [Relu()],
    "in-place relu": lambda: [Relu(torch.relu_, in_place=True)],
    "gelu": lambda: [Act(F.gelu)],
    "in-place silu": lambda: [Act(nn.SiLU(inplace=True), F.silu, in_place=True)],
    "tanh": lambda: [Act(torch.tanh)],
    "no activation": list,
    "batch norm, relu": lambda: [Norm(nn.BatchNorm2d(4)), Relu(nn.ReLU(inplace=True), in_place=True)],
    "batch norm, silu": lambda: [Norm(nn.BatchNorm2d(4)), Act(F.silu)],
    "batch norm": lambda: [Norm(nn.BatchNorm2d(4))],
    "batch norm without affine, relu": lambda: [Norm(nn.BatchNorm2d(4, affine=False)), Relu()],
    "max pool, relu": lambda: [MaxPool(nn.MaxPool2d(3, 2, 1)), Relu()],
}


def boxed_images(low: Tensor, high: Tensor, *shape: int) -> Tensor:
    return low + (high - low) * images(*shape, low=0.0)


def with_stem(*stem: Step) -> Program:
    """Behind the stem a max pool, a convolution and a dense layer."""
    middle = [MaxPool(nn.MaxPool2d(2)), Lin(nn.Conv2d(4, 4, 2)), Relu(), Move(nn.Flatten())]
    width = chain(*stem, *middle).double()(images(2, 2, 8, 8)).shape[1]
    return chain(*stem, *middle, Lin(nn.Linear(width, 3)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("box", BOXES)
def test_first_layer(box: str, stem: str, rule: str) -> None:
    """zB under every table, whatever follows the first layer; zero padding at every edge."""
    given, bounds = BOXES[box]
    bounds = tuple(b.double() for b in bounds)
    program = randomise(with_stem(Lin(nn.Conv2d(2, 4, 3, padding=1)), *STEMS[stem]()).eval(), 8)
    x = boxed_images(*bounds, 2, 2, 8, 8)
    wanted = Oracle(program, x, one_hot(CLASSES, 3), rule, box=bounds).input
    assert_same(explain_class(program, x, CLASSES, rule, box=given), wanted)


FIRST = {
    "strided": lambda: [Lin(nn.Conv2d(2, 4, 3, stride=2, padding=1))],
    "no bias": lambda: [Lin(nn.Conv2d(2, 4, 3, padding=2, bias=False))],
    "grouped": lambda: [Lin(nn.Conv2d(2, 4, 3, groups=2))],
    "same, even": lambda: [Lin(nn.Conv2d(2, 4, (4, 2), padding="same"))],
    "transposed": lambda: [Lin(nn.ConvTranspose2d(2, 4, 2, stride=2))],
    "explicit padding": lambda: [Move(lambda t: F.pad(t, (2, 1, 0, 1))), Lin(nn.Conv2d(2, 4, 3))],
    "padding module": lambda: [Move(nn.ZeroPad2d(2)), Lin(nn.Conv2d(2, 4, 3, stride=2))],
    "reflected": lambda: [Move(nn.ReflectionPad2d(1)), Lin(nn.Conv2d(2, 4, 3))],
    "cropped and turned": lambda: [Move(lambda t: t[..., 1:].transpose(2, 3)), Lin(nn.Conv2d(2, 4, 3))],
    "pixel unshuffle": lambda: [Move(nn.PixelUnshuffle(2)), Lin(nn.Conv2d(8, 4, 1))],
}


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("first", FIRST)
def test_first_layer_of_every_shape(first: str, norm: bool, rule: str) -> None:
    """Padding in front adds nothing to the bounds; other rearrangements carry the bounds with them."""
    program = with_stem(*FIRST[first](), *([Norm(nn.BatchNorm2d(4))] if norm else []), Relu())
    bounds = LOW.view(2, 1, 1), HIGH.view(2, 1, 1)
    x = boxed_images(*bounds, 2, 2, 8, 8)
    for seed in range(21, 41):  # until it is not dead
        wanted = Oracle(randomise(program.eval(), seed), x, one_hot(CLASSES, 3), rule, box=bounds).input
        if bool(wanted.abs().amax((1, 2, 3)).min() > 1e-6):
            break
    assert_same(explain_class(program, x, CLASSES, rule, box=(LOW, HIGH)), wanted)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", ["in the layer", "in front"])
def test_first_layer_by_explicit_loops(padding: str, training: bool) -> None:
    """The specification's formula, pixel by pixel: conv, batch norm, ReLU, then a dense layer for one class."""
    conv, norm, head = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(48, 3)
    model = randomise(nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), head), 10).train(training)
    x = boxed_images(LOW.view(2, 1, 1), HIGH.view(2, 1, 1), 2, 2, 4, 4)
    with torch.no_grad():
        before = conv(x)
        mean, var = norm.running_mean, norm.running_var
        if training:
            mean, var = before.mean((0, 2, 3)), before.var((0, 2, 3), unbiased=False)
        scale = norm.weight / (var + norm.eps).sqrt()
        weight, bias = conv.weight * scale.view(-1, 1, 1, 1), conv.bias * scale + norm.bias - mean * scale
        wanted = torch.zeros_like(x)
        for n in range(2):
            for o in range(3):
                for i in range(4):
                    for j in range(4):
                        inside = [
                            (c, a, b, i + a - 1, j + b - 1)
                            for c in range(2)
                            for a in range(3)
                            for b in range(3)
                            if 0 <= i + a - 1 < 4 and 0 <= j + b - 1 < 4
                        ]
                        y, z = float(bias[o]), max(float(bias[o]), 0.0)
                        for c, a, b, row, column in inside:
                            w, value = float(weight[o, c, a, b]), float(x[n, c, row, column])
                            y += w * value
                            z += w * value - max(w, 0) * float(LOW[c]) - min(w, 0) * float(HIGH[c])
                        R = max(y, 0.0) * float(head.weight[CLASSES[n], o * 16 + i * 4 + j])
                        for c, a, b, row, column in inside:
                            w, value = float(weight[o, c, a, b]), float(x[n, c, row, column])
                            part = w * value - max(w, 0) * float(LOW[c]) - min(w, 0) * float(HIGH[c])
                            wanted[n, c, row, column] += part * R / (z + 0.01)
    if padding == "in front":
        conv.padding = (0, 0)
        model.insert(0, nn.ZeroPad2d(1))
    assert_same(explain_class(model, x, CLASSES, box=(LOW, HIGH)), wanted)


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_two_first_layers_both_take_zb(rule: str) -> None:
    program = Program(
        [
            (Lin(nn.Conv2d(2, 4, 3, padding=1)), (0,)),
            (Relu(), (1,)),
            (Move(lambda t: F.pad(t, (2, 2, 2, 2))), (0,)),
            (Lin(nn.Conv2d(2, 4, 5)), (3,)),
            (Norm(nn.BatchNorm2d(4)), (4,)),
            (Add(), (2, 5)),
            (Relu(), (6,)),
            (Move(nn.Flatten()), (7,)),
            (Lin(nn.Linear(100, 3)), (8,)),
        ]
    )
    randomise(program.eval(), 12)
    bounds = torch.zeros(2, 1, 1, dtype=torch.float64), torch.ones(2, 1, 1, dtype=torch.float64)
    x = images(2, 2, 5, 5, low=0.0)
    wanted = Oracle(program, x, one_hot(CLASSES, 3), rule, box=bounds).input
    assert_same(explain_class(program, x, CLASSES, rule, box=(0, 1)), wanted)


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_first_layer_with_its_norm_read_twice(rule: str) -> None:
    """What leaves the norm without passing the ReLU is relevance of the norm's own output."""
    program = Program(
        [
            (Lin(nn.Conv2d(2, 3, 3)), (0,)),
            (Norm(nn.BatchNorm2d(3)), (1,)),
            (Relu(), (2,)),
            (Cat(), (1, 2, 3)),
            (Lin(nn.Conv2d(9, 4, 1)), (4,)),
            (Relu(), (5,)),
            (Move(nn.Flatten()), (6,)),
            (Lin(nn.Linear(36, 3)), (7,)),
        ]
    )
    randomise(program.eval(), 13)
    bounds = LOW.view(2, 1, 1), HIGH.view(2, 1, 1)
    x = boxed_images(*bounds, 2, 2, 5, 5)
    wanted = Oracle(program, x, one_hot(CLASSES, 3), rule, box=bounds).input
    assert_same(explain_class(program, x, CLASSES, rule, box=(LOW, HIGH)), wanted)


def test_first_layer_of_a_dense_net() -> None:
    program = chain(Lin(nn.Linear(6, 5)), Relu(), Lin(nn.Linear(5, 3)))
    randomise(program, 14)
    low, high = images(6, seed=3) - 1, images(6, seed=4) + 1
    x = low + (high - low) * images(2, 6, low=0.0)
    wanted = Oracle(program, x, one_hot(CLASSES, 3), box=(low, high)).input
    assert_same(explain_class(program, x, CLASSES, box=(low, high)), wanted)


# --- targets, layers, stabiliser ------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", [None, (-1.0, 1.0)])
@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_relevance_at_named_layers(rule: str, box: tuple[float, float] | None) -> None:
    """Also at layers whose output is overwritten in place later."""
    program = randomise(residual(), 15)
    x = images(2, 2, 6, 6)
    numbers = [2, 3, 6, 7, 8, 10] if rule == "zplus" else [4, 5, 2, 3, 6, 7, 8, 10]
    if rule == "epsilon" and box is None:
        numbers += [0, 1]
    bounds = None if box is None else tuple(torch.full((2, 1, 1), b, dtype=torch.float64) for b in box)
    oracle = Oracle(program, x, one_hot(CLASSES, 3), rule, box=bounds)
    for number in numbers:
        name = f"steps.{number}"
        maps = explain_class(program, x, CLASSES, rule, box=box, layers=[name])
        assert set(maps) == {"input", name}
        assert_same(maps["input"], oracle.input)
        if rule == "zplus" and number == 10:
            continue  # the logits start from z, the layer's value is y
        assert_same(maps[name], oracle.behind(number))


@pytest.mark.parametrize("rule", RULES)
def test_joint_is_the_sum_of_all_logits(rule: str) -> None:
    program = randomise(residual(), 16)
    x = images(2, 2, 6, 6)
    joint = fasterisnet.explain(program, x, Joint(), rule=rule)
    assert_same(joint, expected(program, x, torch.ones(2, 3, dtype=torch.float64), rule))
    assert_same(fasterisnet.explain(program, x, AllLogits(), rule=rule).sum(1), joint)


@pytest.mark.parametrize("epsilon", [1e-8, 0.01, 0.5])
@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gamma"])
def test_the_stabiliser_is_the_one_asked_for(rule: str, epsilon: float) -> None:
    program = randomise(residual(), 17)
    x = images(2, 2, 6, 6)
    wanted = Oracle(program, x, one_hot(CLASSES, 3), rule, eps=epsilon).input
    assert_same(explain_class(program, x, CLASSES, rule, epsilon=epsilon), wanted)


def test_zplus_is_never_negative() -> None:
    """Started from non-negative relevance, on images of either sign; zB keeps it so inside its box."""
    program = randomise(residual(), 18)
    x = images(4, 2, 6, 6)
    for box in (None, (-1.0, 1.0)):
        maps = fasterisnet.explain(program, x, AllLogits(), rule="zplus", box=box)
        assert float(maps.min()) >= 0
        assert float(maps.amax((2, 3, 4)).min()) > 0


def test_zplus_loses_only_what_stabilisers_and_biases_take() -> None:
    """Without biases and with a tiny stabiliser, z+ keeps the sum of relevance."""
    program = sandwich(Lin(nn.Conv2d(4, 4, 3, bias=False)), Relu(), MaxPool(nn.MaxPool2d(2)))
    for step in program.steps:
        if isinstance(step, Lin) and isinstance(step.function, nn.Module):
            step.function.bias = None
    randomise(program, 19)
    x = images(2, 2, 6, 6)
    total = explain_class(program, x, CLASSES, "zplus", epsilon=1e-13).sum((1, 2, 3))
    values = Oracle(program, x, one_hot(CLASSES, 3), "zplus", eps=1e-13)
    torch.testing.assert_close(total, values.flow[-1].sum(1), rtol=1e-9, atol=0)


def test_dense_formulas_on_numbers_done_by_hand() -> None:
    """x = (1, -2), W = (3, -4), b = 1: z = 3 + 8 + 1; with l = -3, h = 2: z = 3*4 - 4*(-4) + 1."""
    x, matrix = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, -4.0]])
    bias, R = torch.tensor([1.0]), torch.tensor([[6.0]])
    torch.testing.assert_close(dense_zplus(x, matrix, bias, R, 0.0), torch.tensor([[3.0, 8.0]]) * 6 / 12)
    low, high = torch.full((1, 2), -3.0), torch.full((1, 2), 2.0)
    torch.testing.assert_close(dense_zb(x, low, high, matrix, bias, R, 0.0), torch.tensor([[12.0, 16.0]]) * 6 / 29)
