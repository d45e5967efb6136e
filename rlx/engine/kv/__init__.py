"""The states of sequences: the pool, the sequences, known prefixes, copies on disk."""

from typing import TYPE_CHECKING

from rlx.lazy import modules_of

if TYPE_CHECKING:
    from rlx.engine.kv import prefix_writer, sequence_snapshot

__all__ = ["prefix_writer", "sequence_snapshot"]

# Parts that few models need, imported when they are first used.
__getattr__ = modules_of(__name__, __all__)
