"""The models of a server: what they are called, what opens them, and which one a request means.

Server stage, under the application. All are opened when the server starts, in order, and stay until it ends. The first
is the default.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rlx import demo
from rlx.errors import ArgumentError, RlxError
from rlx.grammar import trial
from rlx.serve.errors import ApiError
from rlx.serve.media import MediaOptions
from rlx.serve.model import ServedModel
from rlx.serve.options import ServerOptions

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def split_name(text: str) -> tuple[str | None, str]:
    """The name and the rest of `NAME=PATH`; without a name None, and the text. The path of a file that exists has none.

    >>> split_name("small=models/qwen3:Q8_0")
    ('small', 'models/qwen3:Q8_0')
    """
    name, equals, path = text.partition("=")
    is_name = equals and name and path and "/" not in name and not Path(text).expanduser().exists()
    return (name, path) if is_name else (None, text)


def check_names(models: Sequence[Sequence[str]]) -> None:
    """Refuses models that requests cannot tell apart.

    Args:
        models: the names of each.

    Raises:
        ArgumentError: there is no model, or two have the same name.
    """
    if not models:
        raise ArgumentError("there is no model", where="model")
    uses = Counter(name for names in models for name in set(names))
    if double := next((name for name in uses if uses[name] > 1), None):
        hint = "give one of them another name, as in other=model.gguf"
        raise ArgumentError(f"two models are called {double!r}", where="model", hint=hint)


def names_of(path: str | Path, given: str | None, aliases: Sequence[str] = ()) -> list[str]:
    """The names of a model: by `aliases`, by its file, and as the user wrote it. No name shows a folder.

    Args:
        given: how the user named the model, or None.
    """
    written = [] if given is None else [Path(given).name if Path(given).exists() else given]
    return list(dict.fromkeys([*aliases, model_name(path), *written]))


def model_name(path: str | Path) -> str:
    """The name of a model: that of its file or folder, without suffix; `demo` for the demo model.

    >>> model_name("/models/Qwen3-0.6B-Q4_K_M.gguf")
    'Qwen3-0.6B-Q4_K_M'
    >>> model_name("/models/big-00001-of-00003.gguf")
    'big'
    """
    for name in (demo.TEXT, demo.VISION):
        if Path(path) == demo.path(name):
            return name
    found = Path(path)
    if found.suffix not in (".gguf", ".safetensors"):
        return found.resolve().name
    plain = _SHARD.sub("", found.stem)
    return plain if plain != "model" else found.resolve().parent.name


Loader = Callable[[], ServedModel]


class Registry:
    """The models of a server.

    Args:
        sources: the models, or what opens them.
        options: how they are served.

    Attributes:
        models: those that are open: all, or none before they are.
    """

    def __init__(self, sources: Sequence[ServedModel | Loader], options: ServerOptions) -> None:
        self._sources, self._options = sources, options
        self.models: tuple[ServedModel, ...] = ()
        self._is_warm = False

    def open(self) -> None:
        """Opens those models that are not open yet.

        Raises:
            ArgumentError: there is no model, or two have the same name.
        """
        found = [each if isinstance(each, ServedModel) else each() for each in self._sources]
        check_names([each.names for each in found])
        for model in found:
            model.media, model.sample = MediaOptions.of(self._options), self._options.sample
            model.max_tokens = self._options.max_tokens
            with suppress(RlxError):  # of a file without one: the requests that need it say so
                model.tokenizer.encode("")  # built now, not in the first request
        self.models = tuple(found)
        threading.Thread(target=_prepare_grammars, args=[self.models], name="rlx-grammars", daemon=True).start()

    @property
    def default_name(self) -> str:
        """The name of the first model; before it is open as the options say."""
        return self.models[0].name if self.models else next(iter(self._options.alias), "")

    @property
    def is_warm(self) -> bool:
        """Whether an answer of any model need not wait for a compile."""
        self._is_warm = self._is_warm or all(each.is_warm for each in self.models)
        return self._is_warm

    def find(self, name: str) -> ServedModel | None:
        """The model with this name; None if there is none."""
        return next((each for each in self.models if name in each.names), None)

    def named(self, name: str | None) -> ServedModel:
        """The model that a request means: without a name the first one; so is one of another name, unless the server
        is strict.

        Raises:
            ApiError: there is no such model.
        """
        found = self.models[0] if name is None else self.find(name)
        if found is None and self._options.strict_model:
            hint = f"there is {', '.join(repr(name) for each in self.models for name in each.names)}"
            raise ApiError(
                404, f"the model {name!r} does not exist here", param="model", code="model_not_found", hint=hint
            )
        return found or self.models[0]

    def close(self) -> None:
        """Ends what is still computed; its clients get an error that says so."""
        closing, self.models = self.models, ()
        for model in closing:
            threading.Thread(target=model.runner.close, name="rlx-closing", daemon=True).start()


def _prepare_grammars(models: Sequence[ServedModel]) -> None:
    """Starts the process that tries grammars and reads the vocabularies for them, before the first request needs both.

    A large vocabulary takes a second.
    """
    with suppress(RlxError):  # without the package: the requests that need it say so
        trial.start()
    for model in models:
        with suppress(RlxError):  # without a tokenizer
            model.runner.grammars.vocabulary  # noqa: B018
