"""Audits of networks whose answer is known, from files to page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.io import write_png

from evaluation.scenes import SIZE, corner_reader, object_reader, scenes
from fasterisnet.audit.audit import Settings, audit
from fasterisnet.audit.examination import CHANCES
from fasterisnet.audit.verdict import decide
from fasterisnet.cli import main
from fasterisnet.data.preparation import Preparation
from fasterisnet.data.sources import open_source
from fasterisnet.errors import InputError, UsageError
from fasterisnet.evaluation.causal import Causal, Effect
from fasterisnet.evaluation.intervals import Estimate
from fasterisnet.models import build_model
from fasterisnet.runs.card import Card
from fasterisnet.runs.folder import Run
from fasterisnet.runs.report import check_classes

NAMES = ["a red one", "blue", "crimson"]  # in the order of the alphabet, as classes are
HOSTILE = ["<script>alert(1)<", 'b" onload="x', "c|d&amp;'e"]
PREPARE = Preparation(size=SIZE)
QUICK = Settings(explained=6, shown=3)


def write(root: Path, count: int = 90, *, masks: bool = True, names: list[str] | None = None, lit: bool = True) -> Path:
    """The scenes as a folder, with a train split of three images. lit: they have a background."""
    images, outlines, labels = scenes(count)
    images = images if lit else images * outlines
    for i, label in enumerate(labels):
        name = (names or NAMES)[label]
        for split in ("train", "test") if i < 3 else ("test",):
            for kind, pixels in (("", images[i]), ("masks", outlines[i].float().clamp(0, 1))):
                if kind and not masks:
                    continue
                place = root / kind / split / name
                place.mkdir(parents=True, exist_ok=True)
                write_png((pixels * 255).round().to(torch.uint8), str(place / f"{i:03d}.png"))
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("scenes"))


def named(*functions: str) -> list[str]:
    return [f"evaluation.scenes:{name}" for name in functions]


def audited(models: list[str], data: Path, out: Path, settings: Settings = QUICK, **options: Any) -> dict[str, Any]:
    return audit(models, str(data), out, prepare=PREPARE, trust=True, settings=settings, **options)


class Page(HTMLParser):
    """What a browser would make of a page: its tags, and the text that is seen."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.seen.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.seen).split())


def check_page(path: Path) -> Page:
    """One file, no script, nothing from elsewhere, below 5 MB, every picture inside."""
    content = path.read_text(encoding="utf-8")
    assert len(content.encode()) < 5_000_000
    found = Page(content)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href"):
            assert name not in attributes or str(attributes[name]).startswith("data:image/"), (tag, attributes)
        assert tag != "img" or attributes.get("alt")
    assert "url(" not in content and "None" not in found.text and "nan" not in found.text.split()
    return found


def test_networks_that_are_known(folder: Path, tmp_path: Path) -> None:
    """Four of them on one page: the verdicts are true, and the page says them in plain words."""
    models = named("corner_reader", "object_reader", "random_network", "constant_network")
    found = audited(models, folder, tmp_path)
    corner, thing, random, constant = found["models"]
    assert [m["verdict"] for m in found["models"]] == [
        "uses the background", "ignores the background", "uses the background", "ignores the background"
    ]  # fmt: skip
    assert found["verdict"] == corner["verdict"] and found["reasons"] == corner["reasons"]
    assert corner["attention"]["epsilon"]["mass"]["value"] == pytest.approx(1)
    assert thing["attention"]["epsilon"]["mass"]["value"] == thing["attention"]["integrated"]["mass"]["value"] == 0
    assert corner["causal"]["tests"]["mixed_other"]["changed"]["value"] == 1
    assert corner["causal"]["tests"]["object_erased"]["accuracy"]["value"] == 1
    assert thing["causal"]["tests"]["mixed_other"]["logits"]["high"] == 0
    assert not thing["caveats"] and "no better than" in random["caveats"][0]
    assert constant["sentence"].endswith("and the object too: its outputs never change.")
    assert constant["causal"]["influence"] is None and constant["attention"]["integrated"]["mass"] is None
    pairs = {(c["first"], c["second"]): c for c in found["comparisons"]}
    assert len(pairs) == 6
    assert pairs[(corner["name"], thing["name"])]["mixed_other"]["probability"] < 1e-6
    page = check_page(tmp_path / "audit.html")
    for m in found["models"]:
        assert m["sentence"] in page.text
    assert page.text.count("It uses the background") == page.text.count("It ignores the background") == 2
    pictures = sum(tag == "img" for tag, _ in page.tags)
    assert 3 * 5 <= pictures <= 3 * 6  # image, swapped image, a map of each network that has one


def test_black_backgrounds_tell_nothing(tmp_path: Path) -> None:
    """A network that reads the corner, and pictures without anything there: nothing moves, and nothing is shown."""
    write(tmp_path / "black", lit=False)
    found = audited(named("corner_reader"), tmp_path / "black", tmp_path / "out")
    assert found["verdict"] == "undecided" and "differs visibly" in found["models"][0]["sentence"]
    assert found["models"][0]["causal"]["exchanged"]["value"] == 0


def test_numbers_have_intervals(folder: Path, tmp_path: Path) -> None:
    audited(named("random_network"), folder, tmp_path)
    content = json.loads((tmp_path / "audit.json").read_text())
    (model,) = content["models"]
    for key in ("accuracy", "influence", "pull", "background_gap"):
        assert model["causal"][key].keys() == {"value", "mean", "sd", "low", "high"}
    for row in (model["causal"]["tests"]["mixed_other"], model["attention"]["epsilon"], model["per_class"][NAMES[0]]):
        for value in row.values():
            if isinstance(value, dict):
                assert value["low"] <= value["value"] <= value["high"]
    assert model["performance"]["posterior"]["per_class"][NAMES[0]]["f1"]["sd"] > 0
    assert model["performance"]["posterior"]["draws"] == 100_000
    assert model["performance"]["calibration"]["curve"]
    assert model["worst_group"]["kind"] == "class"
    assert content["versions"]["torch"] and content["settings"]["seed"] == 0 and content["split"] == "test"


def test_the_same_audit_twice_is_the_same(folder: Path, tmp_path: Path) -> None:
    for name, batch in (("a", 32), ("b", 32), ("c", 7)):
        audited(named("random_network"), folder, tmp_path / name, Settings(explained=6, shown=2, batch=batch))
    first, second, third = (json.loads((tmp_path / n / "audit.json").read_text()) for n in "abc")
    assert first == second
    assert (tmp_path / "a" / "audit.html").read_bytes() == (tmp_path / "b" / "audit.html").read_bytes()
    changed = [m["models"][0]["causal"]["tests"]["background_noise"]["changed"] for m in (first, third)]
    assert changed[0] == changed[1]  # whatever the size of batches


def test_hostile_names_are_shown_not_run(tmp_path: Path) -> None:
    data = write(tmp_path / 'da"ta<img src=x onerror=1>', 12, names=HOSTILE)
    audited(named("corner_reader"), data, tmp_path / "out")
    page = check_page(tmp_path / "out" / "audit.html")
    for name in HOSTILE:
        assert name in page.text


def test_without_masks_what_can_be_measured_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "data", 12, masks=False)
    code = main([
        "audit", "evaluation.scenes:object_reader", "--data", str(data), "--trust", "--size", "16",
        "--out", str(tmp_path / "out"),
    ])  # fmt: skip
    assert code == 0 and "audit.html" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert found["verdict"] == "undecided" and "no image has both a mask" in found["sentence"]
    assert found["models"][0]["performance"]["accuracy"]["value"] == 1
    assert "none of these tests could be made" in check_page(tmp_path / "out" / "audit.html").text


def test_few_images_leave_it_undecided(tmp_path: Path) -> None:
    found = audited(named("object_reader"), write(tmp_path / "data", 12), tmp_path / "out")
    assert found["verdict"] == "undecided" and "undecided" in found["sentence"]


def onnx_reader(path: Path, model: nn.Module, batch: int | str) -> None:
    """A linear network as ONNX, by hand."""
    weight = numpy_helper.from_array(next(model.parameters()).detach().T.contiguous().numpy(), "weight")
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    given = helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, SIZE, SIZE])
    answer = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 3])
    graph = helper.make_graph(nodes, "reader", [given], [answer], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.mark.parametrize("batch", ["batch", 4])
def test_an_onnx_file_has_causal_tests_only(folder: Path, tmp_path: Path, batch: int | str) -> None:
    for name, model in (("corner", corner_reader()), ("object", object_reader())):
        onnx_reader(tmp_path / f"{name}.onnx", model, batch)
    found = audit(
        [str(tmp_path / "corner.onnx"), str(tmp_path / "object.onnx")], str(folder), tmp_path / "out", settings=QUICK
    )
    assert [m["verdict"] for m in found["models"]] == ["uses the background", "ignores the background"]
    assert [m["attention"] for m in found["models"]] == [{}, {}]
    assert found["models"][0]["preparation"]["size"] == SIZE  # from the file
    assert "cannot be looked into" in check_page(tmp_path / "out" / "audit.html").text


def test_files_that_say_how_to_feed_them_are_fed_so(folder: Path, tmp_path: Path) -> None:
    """What `export` writes into an ONNX file, and a run into its weights, counts as it does for a run."""
    prepare = Preparation(size=SIZE, mean=(0.5, 0.5, 0.5), std=(0.1, 0.2, 0.3), fit="pad")
    order = NAMES[::-1]
    onnx_reader(tmp_path / "net.onnx", object_reader(), "batch")
    model = onnx.load(tmp_path / "net.onnx")
    told = {**prepare.to_dict(), "classes": order, "multi_label": False, "model": "small", "method": "dual", "epoch": 3}
    helper.set_model_props(model, {key: json.dumps(value) for key, value in {**told, "weights_sha256": "x"}.items()})
    onnx.save(model, tmp_path / "net.onnx")
    card = Card("small", order, False, prepare.to_dict(), "dual", False, 3, None)
    Run(tmp_path / "mine").save_weights(build_model("small", 3).state_dict(), card)
    models = [str(tmp_path / "net.onnx"), f"small@{tmp_path / 'mine' / 'best.safetensors'}", str(tmp_path / "mine")]
    found = audited(models, folder, tmp_path / "out")
    assert found["classes"] == order
    assert [m["preparation"] for m in found["models"]] == [prepare.to_dict()] * 3
    assert [m["method"] for m in found["models"]] == ["dual"] * 3
    assert found["models"][1]["causal"] == found["models"][2]["causal"]
    helper.set_model_props(model, {"weights_sha256": "1", "classes": '["a", "a"]'})
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(InputError, match="does not say clearly"):
        audited([str(tmp_path / "net.onnx")], folder, tmp_path / "out")


def test_damaged_onnx(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="cannot be read as ONNX"):
        audited([str(tmp_path / "bad.onnx")], folder, tmp_path / "out")
    with pytest.raises(UsageError, match="not a file"):
        audited([str(tmp_path / "none.onnx")], folder, tmp_path / "out")


def test_a_run_and_a_named_network_with_weights(folder: Path, tmp_path: Path) -> None:
    model = build_model("small", 3)
    card = Card("small", NAMES, False, PREPARE.to_dict(), "stochastic", True, 1, None)
    Run(tmp_path / "mine").save_weights(model.state_dict(), card)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    found = audited([str(tmp_path / "mine"), f"small@{tmp_path / 'weights.safetensors'}"], folder, tmp_path / "out")
    run, network = found["models"]
    assert (run["name"], run["kind"], run["method"]) == ("mine", "run", "stochastic")
    assert run["attention"]["epsilon"]["trained_with"] and not run["attention"]["integrated"]["trained_with"]
    assert not network["attention"]["epsilon"]["trained_with"]
    assert run["causal"] == network["causal"]
    assert found["comparisons"][0]["as they are"]["p"] == 1


def test_what_cannot_be_audited(folder: Path, tmp_path: Path) -> None:
    weights = tmp_path / "four.safetensors"
    save_file(build_model("small", 4).state_dict(), weights)
    for models, error, text in (
        (["resnet18"], UsageError, "has no weights"),
        ([f"small@{weights}"], InputError, "Audit it on data of its own classes"),
        (["small@nowhere.pt"], UsageError, "not a file of weights"),
        ([str(folder)], UsageError, "no run folder"),
    ):
        with pytest.raises(error, match=text):
            audited(models, folder, tmp_path / "out")
    with pytest.raises(UsageError, match="say --trust"):
        audit(named("corner_reader"), str(folder), tmp_path / "out")
    with pytest.raises(UsageError, match="no explainer 'dowsing'"):
        Settings(explainers=("dowsing",))
    with pytest.raises(UsageError, match="There is no split 'tset'"):
        audited(named("corner_reader"), folder, tmp_path / "out", split="tset")
    assert not (tmp_path / "out").exists()


class Moody(nn.Module):
    """Fails on bright images and answers with NaN to dark ones."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = object_reader()

    def forward(self, images: Tensor) -> Tensor:
        middle = images[:, :, 5:11, 5:11].mean((2, 3))
        if bool((middle[:, 0] > 0.5).any()):
            raise ValueError("a bright <red> image")
        return self.reader(images).where(middle[:, 1:2] < 0.5, torch.nan)


class Broken(nn.Module):
    """Never works."""

    def forward(self, images: Tensor) -> Tensor:
        raise RuntimeError("expected 5 channels")


def broken() -> nn.Module:
    return Broken()


def test_a_network_that_fails_on_some_images(folder: Path, tmp_path: Path) -> None:
    """Those of class 0 raise, those of class 1 give NaN: the report is about the others, and says so."""
    found = audited(["evaluation.test_audit:Moody", "evaluation.test_audit:broken"], folder, tmp_path)
    (moody,) = found["models"]
    assert moody["answered"] == 30 and len(moody["problems"]) == 60
    texts = {p["problem"] for p in moody["problems"]}
    assert texts == {"ValueError: a bright <red> image", "its logits are not finite numbers"}
    assert (
        "answered to none of 90 images; the first: RuntimeError: expected 5 channels" in found["failed"][0]["problem"]
    )
    page = check_page(tmp_path / "audit.html")
    assert "60 of 90 images got no answer" in page.text and "a bright <red> image" in page.text
    assert "broken could not be audited" in page.text


def test_exit_code_if_nothing_could_be_audited(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(folder), "--out", str(tmp_path / "out"), "--size", "16"]
    assert main(["audit", "evaluation.test_audit:broken", "--trust", *arguments]) == 1
    assert "Nothing could be audited" in capsys.readouterr().err
    assert main(["audit", "evaluation.test_audit:broken", *arguments]) == 2
    assert not (tmp_path / "out").exists()


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 30)
    bad = data / "test" / NAMES[0] / "003.png"
    bad.write_bytes(b"no picture")
    found = audited(named("object_reader"), data, tmp_path / "out")
    assert found["images"] == 29 and len(found["unread"]) == 1 and "003.png" in found["unread"][0]
    assert "003.png" in check_page(tmp_path / "out" / "audit.html").text


def manifest(root: Path, columns: str, cell: Any) -> Path:
    """The scenes by a table; what a row has besides image, mask and split is `cell`'s."""
    write(root)
    lines = [f"image,mask,split,{columns}"]
    for path in sorted((root / "test").rglob("*.png")):
        number, name = int(path.stem), path.parent.name
        split = "train" if number < 3 else "test"
        lines.append(f"test/{name}/{path.name},masks/test/{name}/{path.name},{split},{cell(number, name)}")
    (root / "manifest.csv").write_text("\n".join(lines))
    return root


def test_sources_and_patients(tmp_path: Path) -> None:
    data = manifest(tmp_path / "data", "label,group", lambda i, name: f"{name},hospital {i % 4}")
    found = audited(named("random_network"), data, tmp_path / "out")
    (model,) = found["models"]
    assert found["settings"]["grouped"] is True
    assert set(model["per_source"]) == {f"hospital {i}" for i in range(4)}
    assert sum(r["samples"] for r in model["per_source"].values()) == 87
    assert "source: hospital 2" in check_page(tmp_path / "out" / "audit.html").text
    patients = manifest(tmp_path / "more", "label,patient", lambda i, name: f"{name},p{i // 2}")
    (model,) = audited(named("random_network"), patients, tmp_path / "out")["models"]
    assert "per_source" not in model


def labelled() -> nn.Module:
    return nn.Sequential(corner_reader(), Minus())


class Minus(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits - 8


def test_several_labels(tmp_path: Path) -> None:
    columns = ",".join(f"label:{name}" for name in NAMES)
    data = manifest(tmp_path / "data", columns, lambda _, name: ",".join(str(int(n == name)) for n in NAMES))
    found = audited(["evaluation.test_audit:labelled"], data, tmp_path / "out")
    assert found["verdict"] == "uses the background"
    assert found["models"][0]["performance"]["auc"].keys() == set(found["classes"])
    check_page(tmp_path / "out" / "audit.html")


def test_one_label_and_several_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """The names of the classes may be the same."""
    card = Card("small", NAMES, True, PREPARE.to_dict(), "standard", False, 1, None)
    Run(tmp_path / "mine").save_weights(build_model("small", 3).state_dict(), card)
    with pytest.raises(UsageError, match="crimson, of which several can be true; the data has"):
        audited([str(tmp_path / "mine")], folder, tmp_path / "out")
    with pytest.raises(InputError, match="trained for several labels at once, the data has one label an image"):
        check_classes(card, open_source(str(folder)))


def one_logit() -> nn.Module:
    return nn.Sequential(object_reader(), nn.Linear(3, 1))


def test_two_classes_and_one_logit(tmp_path: Path) -> None:
    data = manifest(tmp_path / "data", "label", lambda _, name: "yes" if name == NAMES[0] else "no")
    found = audited(["evaluation.test_audit:one_logit"], data, tmp_path / "out")
    (model,) = found["models"]
    assert found["classes"] == ["no", "yes"] and model["causal"]["tests"]["mixed_other"]["logits"]["value"] == 0
    area = model["performance"]["auc"]
    assert area["value"] == pytest.approx(model["performance"]["macro_auc"]["value"])
    assert area["low"] <= area["value"] <= area["high"]
    assert "DeLong" in check_page(tmp_path / "out" / "audit.html").text


def chances() -> nn.Module:
    return nn.Sequential(object_reader(), nn.Softmax(1))


def test_probabilities_are_not_taken_for_logits(folder: Path, tmp_path: Path) -> None:
    """A network that ends with a softmax is judged as the one without."""
    found = audited([*named("object_reader"), "evaluation.test_audit:chances"], folder, tmp_path / "out")
    plain, soft = found["models"]
    for key in ("value", "low", "high"):
        errors = [model["performance"]["calibration"]["error"][key] for model in (plain, soft)]
        assert errors[1] == pytest.approx(errors[0], abs=1e-4)
    assert soft["caveats"] == [*plain["caveats"], CHANCES]


def test_options_that_a_run_does_not_need_are_said_to_be_unused(folder: Path, tmp_path: Path) -> None:
    card = Card("small", NAMES, False, PREPARE.to_dict(), "stochastic", True, 1, None)
    Run(tmp_path / "mine").save_weights(build_model("small", 3).state_dict(), card)
    said: list[str] = []
    audit(
        [str(tmp_path / "mine")],
        str(folder),
        tmp_path / "out",
        prepare=Preparation(48),
        settings=QUICK,
        say=said.append,
    )
    assert "mine: says itself how images become its input" in said[0]
    audited([str(tmp_path / "mine")], folder, tmp_path / "out", say=said.append)
    assert sum("says itself" in line for line in said) == 1


def test_large_pictures_fit_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is what compresses worst; what does not fit is left out, and the page says so."""
    monkeypatch.setattr("fasterisnet.audit.page.ROOM", 200_000)
    data = tmp_path / "data"
    for split in ("train", "test"):
        for i in range(6):
            for kind in ("", "masks"):
                place = data / kind / split / f"class {i % 2}"
                place.mkdir(parents=True, exist_ok=True)
                pixels = torch.randint(256, (3, 160, 160), dtype=torch.uint8)
                if kind:
                    pixels = torch.zeros_like(pixels)
                    pixels[:, 40:120, 40:120] = 255
                write_png(pixels, str(place / f"{i}.png"))
    prepare = Preparation(size=160)
    audit(
        ["evaluation.test_audit:averages"], str(data), tmp_path / "out", prepare=prepare, trust=True,
        settings=Settings(explainers=("gradient",)),
    )  # fmt: skip
    page = check_page(tmp_path / "out" / "audit.html")
    assert re.search(r"\d more did not fit", page.text)
    kinds = {str(a["src"]).partition(";")[0] for tag, a in page.tags if tag == "img"}
    assert kinds == {"data:image/jpeg"}


def averages() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


# --- the verdict -----------------------------------------------------------------------------------------------------


def number(value: float, reach: float = 0.01) -> Estimate:
    return Estimate(value, value, reach / 2, max(value - reach, 0), min(value + reach, 1))


def outcome(changed: Estimate, pull: Estimate, influence: Estimate | None, accuracy: float = 0.9) -> Causal:
    effect = Effect(500, number(0.5), number(0), changed, number(0), number(0))
    effects = {"mixed_other": effect, "object_erased": effect}
    return Causal(number(accuracy), effects, number(0), pull, influence, number(1), 0.5)


@pytest.mark.parametrize(
    ("changed", "pull", "influence", "wanted"),
    [
        (0.00, 0.00, 0.02, "ignores the background"),
        (0.30, 0.00, 0.02, "uses the background"),
        (0.00, 0.30, 0.02, "uses the background"),
        (0.00, 0.00, 0.50, "uses the background"),
        (0.05, 0.00, 0.02, "undecided"),
        (0.00, 0.05, 0.02, "undecided"),
        (0.00, 0.00, 0.20, "undecided"),
    ],
)
def test_every_sign_counts(changed: float, pull: float, influence: float, wanted: str) -> None:
    found = decide(outcome(number(changed), number(pull), number(influence)))
    assert found.verdict == wanted and found.reasons and not found.caveats
    assert wanted in found.sentence and len(found.reasons) == 3
    assert ("; yet with a background" in found.sentence) == (wanted == "uses the background" and changed == 0)


@pytest.mark.parametrize(("changed", "wanted"), [(0.0, "undecided"), (0.3, "uses the background")])
def test_backgrounds_that_are_alike_prove_nothing(changed: float, wanted: str) -> None:
    causal = outcome(number(changed), number(0), number(0.02))._replace(exchanged=number(0.1))
    assert decide(causal).verdict == wanted
    assert ("differs visibly" in decide(causal).sentence) == (wanted == "undecided")
    assert decide(causal._replace(exchanged=number(0.9))).verdict != "undecided"


def test_to_have_learned_nothing_is_no_merit() -> None:
    """The sentence is read alone, too: at the end of a training."""
    found = decide(outcome(number(0), number(0), number(0.02), accuracy=0.5))
    assert found.verdict == "ignores the background" and found.sentence.count("no better than") == 1
    assert "no better than" not in decide(outcome(number(0), number(0), number(0.02))).sentence


def test_heatmaps_that_disagree_are_told_but_do_not_decide() -> None:
    causal = outcome(number(0), number(0), number(0.02))
    found = decide(causal, {"integrated gradients": (number(0.9), number(0.6))})
    assert found.verdict == "ignores the background" and "disagree" in found.caveats[0]
    assert not decide(causal, {"integrated gradients": (number(0.3), number(0.6))}).caveats
