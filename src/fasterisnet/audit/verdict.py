"""From the causal tests to a sentence that can be handed to somebody: uses, ignores, or undecided, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from fasterisnet.evaluation.causal import Causal
from fasterisnet.evaluation.intervals import Estimate

Word = Literal["ignores the background", "uses the background", "undecided"]
USES: Word = "uses the background"
IGNORES: Word = "ignores the background"
UNDECIDED: Word = "undecided"
TOLERANCE = 0.05  # of the answers may change, or of the accuracy come, from the background
ENOUGH = 0.5  # of the images have to have a background that differs from those of other classes
FREE, BOUND = 0.15, 0.25  # the background's part in what moves the outputs: below, ignored; above, used


class Verdict(NamedTuple):
    """The word, a sentence in plain words, the reasons for it, and what else has to be known."""

    verdict: Word
    sentence: str
    reasons: list[str]
    caveats: list[str]


class _Sign(NamedTuple):
    """A number that speaks for the use of the background if it is surely above one bound, against it if below one."""

    estimate: Estimate
    below: float
    above: float
    text: str

    @property
    def speaks_for(self) -> bool:
        return self.estimate.low > self.above

    @property
    def speaks_against(self) -> bool:
        return self.estimate.high < self.below


def decide(causal: Causal, masses: Mapping[str, tuple[Estimate, Estimate]] | None = None) -> Verdict:
    """The verdict of the causal tests alone. masses: of explainers that the network was not trained with, relevance in
    the background and the background's area; they are compared with the verdict, they do not make it.
    """
    signs = _signs(causal)
    caveats = _caveats(causal)
    if not signs:
        reason = "no image has both a mask and a background that could be exchanged with that of another class"
        sentence = f"Whether this classifier uses the background cannot be told: {reason}."
        return Verdict(UNDECIDED, sentence, [_capital(reason) + "."], caveats)
    found = [sign for sign in signs if sign.speaks_for]
    if found:
        sentence = f"This classifier uses the background: {found[0].text}"
        if signs[0].speaks_against:
            sentence += f"; yet {signs[0].text}"
        others = [sign for sign in signs if sign not in found]
        return Verdict(USES, sentence + ".", [_capital(sign.text) + "." for sign in found + others], caveats)
    same = causal.exchanged
    if same is not None and (same.mean if same.value is None else same.value) < ENOUGH:
        reason = (
            f"a background from another class differs visibly from an image's own in {percent(same)} of the images "
            "only, so exchanging backgrounds shows nothing"
        )
        sentence = f"Whether this classifier uses the background cannot be told from these images: {reason}."
        return Verdict(UNDECIDED, sentence, [_capital(reason) + ".", *[_capital(s.text) + "." for s in signs]], caveats)
    if all(sign.speaks_against for sign in signs):
        blind = causal.influence is None
        sentence = f"This classifier ignores the background: {signs[0].text}."
        if blind:
            sentence = "This classifier ignores the background, and the object too: its outputs never change."
        elif caveats:  # a sentence that is read alone must not sound like praise
            sentence += f" But {caveats[0][:1].lower()}{caveats[0][1:]}"
        caveats += [
            f"The heatmaps ({name}) disagree: {percent(mass)} of the relevance lies in the background, which is "
            f"{percent(area)} of the area."
            for name, (mass, area) in (masses or {}).items()
            if mass.low > area.high
        ]
        return Verdict(IGNORES, sentence, [_capital(sign.text) + "." for sign in signs], caveats)
    open_signs = [sign for sign in signs if not sign.speaks_against]
    sentence = f"Whether this classifier uses the background is undecided: {open_signs[0].text}, which is "
    sentence += "neither clearly nothing nor clearly something."
    return Verdict(UNDECIDED, sentence, [_capital(sign.text) + "." for sign in signs], caveats)


def _signs(causal: Causal) -> list[_Sign]:
    other = causal.effects.get("mixed_other")
    if other is None or other.changed is None:
        return []
    signs = [
        _Sign(
            other.changed, TOLERANCE, TOLERANCE,
            f"with a background from another class behind the same object, {percent(other.changed)} of its answers "
            "change",
        )
    ]  # fmt: skip
    erased = causal.effects.get("object_erased")
    if causal.pull is not None and erased is not None and erased.accuracy is not None:
        text = (
            f"with the object erased it is right in {percent(erased.accuracy)} of the images, {points(causal.pull)} "
            "more often than if the background is of another class as well"
        )
        signs.append(_Sign(causal.pull, TOLERANCE, TOLERANCE, text))
    if causal.influence is not None:
        text = (
            f"{percent(causal.influence)} of what moves its outputs is the background "
            "(object and background exchanged in turn)"
        )
        signs.append(_Sign(causal.influence, FREE, BOUND, text))
    return signs


def _caveats(causal: Causal) -> list[str]:
    """That it has learned nothing, if it has."""
    found = []
    accuracy = causal.original
    if accuracy is not None and causal.chance is not None and accuracy.low <= causal.chance:
        found.append(
            f"It is right in {percent(accuracy)} of the images, no better than naming the most frequent class always "
            f"({100 * causal.chance:.0f} %): what it ignores or uses, it does not use well."
        )
    return found


def percent(estimate: Estimate) -> str:
    """A share with its interval, in words."""
    value = estimate.mean if estimate.value is None else estimate.value
    return f"{_digits(value)} % ({_digits(estimate.low)} to {_digits(estimate.high)})"


def points(estimate: Estimate) -> str:
    """A difference of shares."""
    value = estimate.mean if estimate.value is None else estimate.value
    return f"{_digits(value)} points ({_digits(estimate.low)} to {_digits(estimate.high)})"


def _digits(value: float) -> str:
    """Percent with a decimal where it matters: near 0 and near 100."""
    shown = 100 * value
    text = f"{shown:.0f}" if 10 <= abs(shown) <= 90 or abs(shown - round(shown)) < 0.05 else f"{shown:.1f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
