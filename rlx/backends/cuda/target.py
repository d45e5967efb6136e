"""The card as a target: which machine code it takes, and what passes may ask of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlx.backends import cuda
from rlx.backends.cuda import driver
from rlx.backends.cuda.driver import Card
from rlx.backends.cuda.features import Features
from rlx.backends.cuda.layouts import LAYOUTS, CardLayouts
from rlx.errors import TargetError
from rlx.passes.capabilities import Capabilities

if TYPE_CHECKING:
    from rlx.backends.device import Backend

#: What a block computes for itself lies in its shared memory; of several rows nothing does: a block is small.
CAPABILITIES = Capabilities(
    bf16_dots=False, bf16_tiles=False, own_cost=1 << 17, own_cost_rows=0, own_writes=True, own_seen=False,
    many_differ=True, layouts=LAYOUTS,
)  # fmt: skip

#: Level -> the lowest PTX version that has it and what kernels use, and the CUDA version of a driver that takes it: at
#: least 11.8, which has `cuLaunchKernelEx`. The lowest version is emitted, so that old drivers take it. Source: the
#: release notes of the PTX ISA.
LEVELS: Mapping[str, tuple[int, int]] = {
    "sm_75": (65, 11080),
    "sm_80": (70, 11080),
    "sm_86": (71, 11080),
    "sm_87": (74, 11080),
    "sm_89": (78, 11080),
    "sm_90": (78, 11080),
    "sm_90a": (80, 12000),
    "sm_100": (86, 12070),
    "sm_103": (88, 12090),
    "sm_120": (87, 12080),
    "sm_121": (88, 12090),
}


@dataclass(frozen=True)
class Target:
    """One kind of card.

    Attributes:
        level: its machine language, such as "sm_90"; "sm_90a" has what only cards of sm_90 have.
        driver: the CUDA version of the driver; 0 where there is no card, and code is only looked at.
        numbers: of the cards that compute together.
        card: the level of the card if that is another one, whose code it runs, too.
    """

    level: str
    driver: int = 0
    capabilities: Capabilities = field(default=CAPABILITIES, repr=False)
    numbers: tuple[int, ...] = (0,)
    card: str = ""

    @property
    def backend(self) -> Backend:
        """The CUDA backend, which makes targets."""
        if not self.driver:
            return cuda.compile_only.backend_of(self.numbers)
        return cuda.backend.backend_of(self.numbers)

    @property
    def cards(self) -> int:
        """How many cards compute together."""
        return len(self.numbers)

    @property
    def layouts(self) -> CardLayouts:
        """How values lie in the memory of each card."""
        found = self.capabilities.layouts
        assert isinstance(found, CardLayouts)
        return found

    @property
    def tuning(self) -> dict[str, int]:
        """None: nothing is tuned."""
        return {}

    @property
    def ptx(self) -> int:
        """The version of PTX, ten times."""
        return LEVELS[self.level][0]

    @property
    def features(self) -> Features:
        """What kernels may use (CUDA C++ programming guide, compute capabilities).

        No kernel overlaps another where one card is taken as two: blocks that wait for the other one would take its
        place.
        """
        number = _number(self.level)
        kibibytes = 64 if number < 80 else 163 if number in (80, 87) else 227 if 90 <= number < 120 else 99
        return Features(
            shared=kibibytes << 10,
            overlaps=number >= 90 and len({*self.numbers}) == self.cards,
            together=self.level == "sm_90a",
            copies=number >= 80,
            bf16=number >= 80,
        )

    def describe(self) -> dict[str, str]:
        """What changes code, and on which cards it is loaded."""
        found = {"level": self.level, "ptx": str(self.ptx), "driver": str(self.driver)}
        found |= {"card": self.card} if self.card else {}
        return found | ({"cards": ",".join(map(str, self.numbers))} if self.numbers != (0,) else {})


def of_cards(cards: Sequence[Card], numbers: tuple[int, ...]) -> Target:
    """The target of some cards that compute together.

    Raises:
        TargetError: they are of different kinds, or as `of_card`.
    """
    found = [of_card(card) for card in cards]
    if len({each.level for each in found}) > 1:
        what = f"cards {numbers} are of different kinds: {', '.join(each.level for each in found)}"
        raise TargetError(what, where="device cuda", hint="Choose equal cards, or one.")
    return replace(found[0], numbers=numbers, capabilities=capabilities_of(len(numbers)))


def capabilities_of(cards: int) -> Capabilities:
    """What passes may ask of so many cards."""
    return replace(CAPABILITIES, own_tables=cards == 1, layouts=replace(LAYOUTS, cards=cards))


def of_card(card: Card) -> Target:
    """The target of a card: its own level, or the newest older one of the same kind.

    Raises:
        TargetError: the card or the driver is too old.
    """
    major, minor = card.attribute(75), card.attribute(76)
    known = [level for level in LEVELS if _number(level) // 10 == major and _number(level) <= 10 * major + minor]
    if not known:
        hint = f'Cards from {next(iter(LEVELS))} on serve, up to {list(LEVELS)[-1]}. Choose device="cpu".'
        raise TargetError(f"{card.name} is a card of sm_{major}{minor}", where="device cuda", hint=hint)
    found = driver.version()
    level = next((level for level in reversed(known) if LEVELS[level][1] <= found), known[0])
    if found < LEVELS[level][1]:
        what = f"the driver supports CUDA {dotted(found)}, and {level} needs {dotted(LEVELS[level][1])}"
        raise TargetError(what, where="device cuda", hint='Install a newer driver, or choose device="cpu".')
    return Target(level, found)


def named(level: str, numbers: tuple[int, ...] = (0,)) -> Target:
    """The target of that name, to look at its code.

    Raises:
        TargetError: it is not known.
    """
    if level not in LEVELS:
        raise TargetError(f"level {level!r} is unknown", where="device cuda", hint=f"Known: {', '.join(LEVELS)}.")
    return Target(level, capabilities=capabilities_of(len(numbers)), numbers=numbers)


def as_level(card: Target, chosen: Target) -> Target:
    """A card with the code of another level if it runs this, else the other level alone.

    Cards run the code of all older ones, but for levels that end in "a", which are those of one card.
    """
    older = _number(chosen.level) <= _number(card.level) and not chosen.level.endswith("a")
    if card.level == chosen.level:
        return card
    return replace(card, level=chosen.level, card=card.level) if older else chosen


def _number(level: str) -> int:
    found = re.search(r"\d+", level)
    assert found is not None
    return int(found[0])


def dotted(version: int) -> str:
    """A version of CUDA as people write it."""
    return f"{version // 1000}.{version % 1000 // 10}"
