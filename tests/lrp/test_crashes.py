"""What used to crash, and what has to be refused in words that say what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import fasterisnet as fi
from fasterisnet.errors import FasterISNetError, InputError
from lrp.helpers import RULES, Net, assert_alike, assert_close, pictures, quietly, randomised, twins


def small() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    randomised(model).eval()
    return model


IMAGES = pictures(2, 3, 4, 4)


# --- crashes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_clamped_weights_and_integers(rule: str) -> None:
    """`clamp` on what is no activation: weights, indices, positions."""

    def clamped(m: Any, x: Tensor) -> Tensor:
        order = torch.arange(8).sub(1).clamp(min=0)
        return F.linear(F.linear(x, m.a.weight.clamp(min=0), m.a.bias)[:, order], m.fc.weight.clamp(-1, 1), m.fc.bias)

    def plain(m: Any, x: Tensor) -> Tensor:
        order = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6])
        return F.linear(F.linear(x, F.relu(m.a.weight), m.a.bias)[:, order], F.hardtanh(m.fc.weight), m.fc.bias)

    assert_alike(*twins([plain, clamped], a=nn.Linear(5, 8), fc=nn.Linear(8, 3)), pictures(2, 5), rule=rule)


def test_explain_inside_a_model() -> None:
    """A model that looks at the heatmap of another: its result is a constant, or differentiated; nothing crashes."""
    inner = small()

    def nested(m: Any, x: Tensor) -> Tensor:
        heatmap = fi.explain(inner, x.detach(), 1)
        return m.fc((torch.relu(m.conv(x)) * heatmap.mean(1, keepdim=True).clamp(min=0)).flatten(1))

    def fixed(heatmap: Tensor) -> Callable[[Any, Tensor], Tensor]:
        gate = heatmap.mean(1, keepdim=True).clamp(min=0)
        return lambda m, x: m.fc((torch.relu(m.conv(x)) * gate).flatten(1))

    nets = twins([fixed(fi.explain(inner, IMAGES, 1)), nested], conv=nn.Conv2d(3, 4, 3, padding=1), fc=nn.Linear(64, 3))
    for rule in RULES:
        assert_alike(*nets, IMAGES, rule=rule)


class MetaTensor(Tensor):
    """Images with notes, as MONAI's: a subclass that carries attributes through every function."""

    notes: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, MetaTensor):
            out.notes = "carried"
        return out


@pytest.mark.parametrize("rule", RULES)
def test_tensor_subclasses_as_images(rule: str) -> None:
    model = small()
    images = IMAGES.clone().as_subclass(MetaTensor)
    images.notes = "brain"
    found, messages = quietly(lambda: fi.explain(model, images, 1, rule=rule))
    assert not messages
    assert_close(found.as_subclass(Tensor), fi.explain(model, IMAGES, 1, rule=rule), 1e-10)
    trained = fi.explain(model, images, 1, rule=rule, create_graph=True)
    trained.square().sum().backward()
    assert all(p.grad is not None for p in (model[0].weight, model[4].weight))
    box = fi.explain(model, images, 1, rule=rule, box=(-6.0, 6.0), layers=["2"])
    assert set(box) == {"input", "2"}


@pytest.mark.parametrize("rule", RULES)
def test_parameter_as_images(rule: str) -> None:
    """Images that are a leaf with gradients of their own, a view, an expanded tensor or non-contiguous."""
    model = small()
    expected = fi.explain(model, IMAGES, 1, rule=rule)
    spelled = {
        "parameter": nn.Parameter(IMAGES.clone()),
        "computed": (IMAGES.clone().requires_grad_() * 1.0),
        "view": torch.stack([IMAGES, IMAGES])[1],
        "strided": IMAGES.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    }
    for name, images in spelled.items():
        assert_close(fi.explain(model, images, 1, rule=rule), expected, 1e-10, name)
        trained = fi.explain(model, images, 1, rule=rule, create_graph=True)
        trained.square().sum().backward()
        assert_close(trained.detach(), expected, 1e-10, name)
    one = IMAGES[:1].expand(2, -1, -1, -1)
    assert_close(fi.explain(model, one, 1, rule=rule), expected[:1].expand(2, -1, -1, -1), 1e-10, "expanded")


@pytest.mark.parametrize("rule", RULES)
def test_einsum_with_a_diagonal(rule: str) -> None:
    """`einsum('bchh,hd->bcd')` takes a diagonal first."""

    def by_einsum(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(torch.einsum("bchh,hd->bcd", x, m.weight)).flatten(1))

    def by_hand(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(torch.diagonal(x, dim1=2, dim2=3) @ m.weight).flatten(1))

    nets = twins([by_hand, by_einsum], weight=nn.Parameter(torch.zeros(4, 5)), fc=nn.Linear(15, 3))
    assert_alike(*nets, IMAGES, rule=rule)


def test_quantisation_aware_buffers() -> None:
    """Fake-quantised weights and observers, whose buffers are integers and change shape."""
    model = small()
    try:
        from torch.ao import quantization
    except ImportError:
        quantization = None
    assert quantization is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        prepared = quantization.prepare_qat(model.float().train())
    state = {name: buffer.clone() for name, buffer in prepared.named_buffers()}
    found, _ = quietly(lambda: fi.explain(prepared, IMAGES.float(), 1))
    assert bool(found.isfinite().all()) and float(found.abs().max()) > 0
    for name, buffer in prepared.named_buffers():
        assert buffer.shape == state[name].shape and torch.equal(buffer, state[name]), name


@pytest.mark.parametrize("rule", ["epsilon", "zplus"])
def test_shapes_that_are_easily_forgotten(rule: str) -> None:
    """One sample, one class, one channel; logits of one dimension are refused."""
    for batch, channels, classes in ((1, 1, 1), (1, 3, 2), (5, 1, 1)):
        model = randomised(
            nn.Sequential(nn.Conv2d(channels, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, classes))
        ).eval()
        heatmap = fi.explain(model, pictures(batch, channels, 4, 4), 0, rule=rule)
        assert heatmap.shape == (batch, channels, 4, 4) and bool(heatmap.isfinite().all())


# --- check ---------------------------------------------------------------------------------------------------------


def checked(model: nn.Module, *arguments: Any, **options: Any) -> Any:
    verdict = fi.check(model, IMAGES, *arguments, **options)
    assert str(verdict)
    return verdict


def test_check_with_one_target_a_sample() -> None:
    for target in (torch.tensor([0, 2]), [0, 2], torch.tensor([1, 1])):
        assert checked(small(), target).ok
    images, classes = pictures(5, 3, 4, 4), [0, 1, 2, 0, 1]
    for target in (classes, torch.tensor(classes), np.array(classes)):
        assert fi.check(small(), images, target).ok


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_check_under(context: Callable[[], Any]) -> None:
    model = small()
    with context():
        assert checked(model).ok


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "kind", ["weight_norm", "old weight_norm", "pruned", "spectral", "trace", "script", "frozen parameters"]
)
def test_check_of_models_that_cannot_be_copied(kind: str) -> None:
    model: Any = small()
    if kind == "weight_norm":
        parametrizations.weight_norm(model[0])
    elif kind == "old weight_norm":
        torch.nn.utils.weight_norm(model[0])
        model(IMAGES)  # the computed weight is no leaf, so the module cannot be copied
    elif kind == "pruned":
        prune.l1_unstructured(model[4], "weight", 0.3)
        model(IMAGES)
    elif kind == "spectral":
        parametrizations.spectral_norm(model[4])
        model.eval()
    elif kind == "trace":
        model = torch.jit.trace(model, IMAGES)
    elif kind == "script":
        model = torch.jit.script(model)
    else:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    verdict = checked(model)
    assert verdict.finite
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_check_of_a_model_that_keeps_what_it_computed() -> None:
    """A table computed once and kept, as EfficientFormer's biases: examined in double precision all the same."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.kept.setdefault("biases", m.table * 2)
        return m.fc(torch.relu(m.hidden(x) + m.kept["biases"]))

    model = Net(forward, hidden=nn.Linear(4, 6), fc=nn.Linear(6, 3), table=nn.Parameter(torch.randn(6)))
    model.kept = {}
    verdict = fi.check(model.float().eval(), pictures(2, 4).float())
    assert verdict.ok and verdict.second_order_error < 1e-6, str(verdict)


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
def test_check_says_why_reentrant_checkpointing_fails() -> None:
    model = Net(lambda m, x: checkpoint(m.inner, x, use_reentrant=True), inner=small()).eval()
    try:
        verdict = fi.check(model, IMAGES)
    except FasterISNetError as error:
        text = str(error)
    else:
        text = str(verdict) if not verdict.ok else "checkpoint"
    assert "checkpoint" in text.lower()


# --- refused -------------------------------------------------------------------------------------------------------

UNREACHED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "detached": lambda m, x: m.fc(x.detach().flatten(1)),
    "no_grad": lambda m, x: m.fc(under_no_grad(m, x)),
    "a constant": lambda m, x: m.fc(torch.ones(len(x), 48, dtype=x.dtype)),
    "rounded to integers": lambda m, x: m.fc((x > 0).double().flatten(1)),
    "by argmax": lambda m, x: m.fc(F.one_hot(x.flatten(1).argmax(1), 48).double()),
    "through numpy": lambda m, x: m.fc(torch.from_numpy(x.detach().numpy()).flatten(1)),
    "shape alone": lambda m, x: m.fc(x.new_ones(x.shape).flatten(1)),
}


def under_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m.fc.weight.mean() * x.flatten(1)


@pytest.mark.parametrize("rule", ["epsilon", "zplus", "gradient"])
@pytest.mark.parametrize("name", UNREACHED)
def test_a_score_that_does_not_depend_on_the_images(name: str, rule: str) -> None:
    (net,) = twins([UNREACHED[name]], fc=nn.Linear(48, 3))
    with pytest.raises(FasterISNetError, match=r"(?i)depend|differentiable|graph|detach"):
        fi.explain(net, IMAGES, 1, rule=rule)
    with pytest.raises(FasterISNetError):
        fi.explain(net, IMAGES, 1, rule=rule, create_graph=True)


def test_a_target_that_does_not_depend_on_the_logits() -> None:
    with pytest.raises(InputError):
        fi.explain(small(), IMAGES, lambda logits: logits.detach().sum(1))
    with pytest.raises(InputError):
        fi.explain(small(), IMAGES, lambda logits: torch.ones(2, dtype=logits.dtype))


def test_one_class_that_does_not_depend_on_the_images() -> None:
    """A constant logit beside real ones: its map is an error or zero with a reason, the others' are right."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(len(x), 1, dtype=x.dtype), m.fc(x.flatten(1))], 1)

    net, plain = twins([forward, lambda m, x: m.fc(x.flatten(1))], fc=nn.Linear(48, 3))
    assert_close(fi.explain(net, IMAGES, 2), fi.explain(plain, IMAGES, 1), 1e-10)


def test_broken_models_keep_their_own_error() -> None:
    """An error of the model's forward pass is the model's, not ours."""
    with pytest.raises(RuntimeError, match="shape"):
        fi.explain(nn.Sequential(nn.Flatten(), nn.Linear(7, 3)).double(), IMAGES, 1)

    def raising(_m: Any, _x: Tensor) -> Tensor:
        raise KeyError("from the model")

    with pytest.raises(KeyError, match="from the model"):
        fi.explain(Net(raising), IMAGES, 1)


def test_unknown_rules_and_layers() -> None:
    with pytest.raises(InputError):
        fi.explain(small(), IMAGES, 1, rule="nonsense")
    with pytest.raises(FasterISNetError):
        fi.explain(small(), IMAGES, 1, layers=["nowhere"])
    with pytest.raises(FasterISNetError):
        fi.explain(small(), IMAGES, 7)


@pytest.mark.parametrize("rule", RULES)
def test_a_layer_that_is_not_run_or_off_the_way(rule: str) -> None:
    """Names of modules without an output on the way: a clear error."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.relu(m.hidden(x)))

    (net,) = twins([forward], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3), unused=nn.Linear(5, 6))
    with pytest.raises(FasterISNetError, match="unused"):
        fi.explain(net, pictures(2, 5), 1, rule=rule, layers=["unused"])


@pytest.mark.parametrize("rule", RULES)
def test_not_a_number_inside_is_never_hidden(rule: str) -> None:
    """Infinite activations give values that are not finite, or an error; never a finite map."""
    (net,) = twins([lambda m, x: m.fc(m.hidden(x) * 1e308 * 1e10)], hidden=nn.Linear(5, 6), fc=nn.Linear(6, 3))
    try:
        heatmap = fi.explain(net, pictures(2, 5), 1, rule=rule)
    except FasterISNetError:
        return
    assert not bool(heatmap.isfinite().all())


@pytest.mark.parametrize("rule", RULES)
def test_several_outputs(rule: str) -> None:
    """Models that return tuples, dictionaries or objects: explained by their logits, or a clear error."""
    for wrap in (lambda y: (y, y * 2), lambda y: {"logits": y}, lambda y: [y]):
        model = Net(lambda m, x, w=wrap: w(m.inner(x)), inner=small()).eval()
        try:
            found = fi.explain(model, IMAGES, 1, rule=rule)
        except FasterISNetError:
            continue
        assert_close(found, fi.explain(small(), IMAGES, 1, rule=rule), 1e-10)
