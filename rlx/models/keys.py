"""Typed reading of a model's metadata: every value is checked, and an error names the key and what was expected.

First step of the models stage: `rope.py` and `reader.py` read GGUF metadata and `config.json` through `Keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from rlx.errors import ConfigError, UnsupportedModelError

Range = tuple[float, float]
T = TypeVar("T")

POSITIVE: Range = (1e-30, 1e30)  # of a float that is divided by
EPS: Range = (1e-12, 1.0)
CAP: Range = (0.0, 1e6)
FACTOR: Range = (1e-6, 1e6)
WIDTH, HEADS = (1, 1 << 24), (1, 1 << 14)
_ABSENT: Any = object()
_SHOWN = 60  # characters of a value in an error


class Keys:
    """The values under one prefix of a mapping.

    The typed readers take a default for an absent key; without one, such a key is an error.

    Args:
        mapping: GGUF key-values, or a parsed `config.json`; None (JSON null) counts as absent.
        where: shown in errors: the file.
        prefix: put before every key, `"llama."` in GGUF.
    """

    def __init__(self, mapping: Mapping[str, Any], where: object, prefix: str = "") -> None:
        self.mapping, self.where, self.prefix = mapping, where, prefix

    def __contains__(self, key: str) -> bool:
        name = self.prefix + key
        return name in self.mapping and self.mapping[name] is not None

    def get(self, key: str, default: Any = _ABSENT, expected: str = "a value") -> Any:
        """The unchecked value; an absent key without a default is an error."""
        if key in self:
            return self.mapping[self.prefix + key]
        if default is _ABSENT:
            raise ConfigError(f"the key '{self.prefix}{key}' is missing, expected {expected}", where=self.where)
        return default

    def integer(self, key: str, allowed: tuple[int, int], default: int | None = None) -> int:
        """An integer in the inclusive range; `ConfigError` otherwise."""
        expected = f"an integer from {allowed[0]} to {allowed[1]}"
        return int(self._read(key, default, expected, lambda v: is_integer(v) and allowed[0] <= v <= allowed[1]))

    def integers(self, key: str, allowed: tuple[int, int], layers: int, default: int | None = None) -> tuple[int, ...]:
        """One integer in the inclusive range per layer, from an array or one number for all; else `ConfigError`."""
        if not isinstance(plain(self.get(key, default)), list):
            return (self.integer(key, allowed, default),) * layers
        return tuple(self.elements(key, lambda keys: keys.integer(key, allowed), layers))

    def same(self, key: str, allowed: tuple[int, int], layers: int, default: int | None = None) -> int:
        """An integer that is equal for all layers; `UnsupportedModelError` for an array with different elements."""
        found = self.integers(key, allowed, layers, default)
        if any(value != found[0] for value in found):
            self.unsupported(key, found, "layers of different sizes are not supported for this architecture")
        return found[0]

    def even(self, key: str, allowed: tuple[int, int], default: int | None = None) -> int:
        """An even integer in the inclusive range; `ConfigError` otherwise."""
        found = self.integer(key, allowed, default)
        if found % 2:
            self.wrong(key, found, "an even number")
        return found

    def number(self, key: str, allowed: Range, default: float | None = None) -> float:
        """A number in the inclusive range, as a float; `ConfigError` otherwise, for NaN too."""
        expected = f"a number from {allowed[0]:g} to {allowed[1]:g}"
        valid = lambda v: (is_integer(v) or isinstance(v, float)) and allowed[0] <= v <= allowed[1]  # noqa: E731
        return float(self._read(key, default, expected, valid))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or False; `ConfigError` otherwise."""
        return bool(self._read(key, default, "true or false", lambda v: isinstance(v, bool)))

    def text(self, key: str, default: str | None = None) -> str:
        """A string; `ConfigError` otherwise."""
        return str(self._read(key, default, "a string", lambda v: isinstance(v, str)))

    def choice(self, key: str, known: Mapping[str, str], default: str | None = None) -> str:
        """The meaning of the string by the table `known`; `UnsupportedModelError` for an unknown string."""
        found = self.text(key, default)
        if found not in known:
            self.unsupported(key, found, f"supported are {', '.join(known)}")
        return known[found]

    def elements(self, key: str, read: Callable[[Keys], T], count: int | None = None) -> list[T]:
        """The elements of an array, each read and checked as a single value under the key.

        Args:
            read: reads the key from a mapping, such as `lambda keys: keys.flag(key)`.
            count: required number of elements, one per layer; None for any number.

        Raises:
            ConfigError: the key is missing or not an array of that length; or an error of `read`.
        """
        expected = "an array" if count is None else f"{count} elements"
        found = plain(self.get(key, expected=expected))
        if not isinstance(found, list) or count not in (None, len(found)):
            self.wrong(key, found, expected)
        return [read(Keys({self.prefix + key: each}, self.where, self.prefix)) for each in found]

    def nested(self, key: str, *, optional: bool = False) -> Keys:
        """The keys of a nested object; `ConfigError` if it is not an object, or absent and not `optional`."""
        found = self.get(key, {} if optional else _ABSENT, "an object")
        if not isinstance(found, Mapping):
            self.wrong(key, found, "an object")
        prefix = f"{self.prefix}{key}."
        return Keys({prefix + name: value for name, value in found.items()}, self.where, prefix)

    def require(self, key: str, only: Any, because: str) -> None:
        """`UnsupportedModelError` if the key is present with another value than `only`."""
        if plain(self.get(key, only)) != only:
            self.unsupported(key, self.get(key), because)

    def wrong(self, key: str, found: Any, expected: str) -> NoReturn:
        """Raises the `ConfigError` for a value of the wrong type or range."""
        raise ConfigError(f"'{self.prefix}{key}' is {_show(found)}, expected {expected}", where=self.where)

    def unsupported(self, key: str, found: Any, because: str) -> NoReturn:
        """Raises the `UnsupportedModelError` for a value whose meaning rlx does not support."""
        raise UnsupportedModelError(f"'{self.prefix}{key}' is {_show(found)}: {because}", where=self.where)

    def _read(self, key: str, default: Any, expected: str, valid: Callable[[Any], bool]) -> Any:
        if key not in self and default is not None:
            return default
        found = self.get(key, expected=expected)
        if not valid(found):
            self.wrong(key, found, expected)
        return found


def known(keys: Keys, key: str, names: Mapping[str, T], encoders: Container[str] = ()) -> T:
    """The meaning of the string under `key`; `UnsupportedModelError` lists the known names.

    Args:
        encoders: names of models of another kind.
    """
    found = keys.text(key)
    if found in encoders:
        hint = "use `rlx embed` or `rlx rerank`, or in Python rlx.auto_runner(path).embed(texts)"
        raise UnsupportedModelError("the model is a text encoder: it generates no text", where=keys.where, hint=hint)
    if found not in names:
        hint = f"Supported are {', '.join(names)}."
        raise UnsupportedModelError(f"the architecture '{found}' ({key}) is not supported", where=keys.where, hint=hint)
    return names[found]


def is_integer(value: object) -> bool:
    """Whether it is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """An array of any kind as a list of Python values; other values unchanged."""
    if isinstance(value, str | Mapping):
        return value
    if isinstance(value, Sequence):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _show(value: Any) -> str:
    value = plain(value)
    text = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
