"""Files of requests in OpenAI"s batch form, answered without HTTP: `rlx batch`."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.serve.batch import results, source

__all__ = ["results", "source"]

# Imported when they are first used: the command line only names them.
__getattr__ = modules_of(__name__, __all__)
