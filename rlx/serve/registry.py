"""The models of a server: what opens them, and which one a request means.

Server stage, under the application. All are opened when the server starts, in order, and stay until it ends. The first
is the default.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from rlx.errors import RlxError
from rlx.grammar import trial
from rlx.serve.errors import ApiError
from rlx.serve.media import MediaOptions
from rlx.serve.model import ServedModel
from rlx.serve.naming import check_names
from rlx.serve.options import ServerOptions

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
        """What the first model is called; before it is open as the options say."""
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
