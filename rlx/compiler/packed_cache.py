"""Packed-weight cache: packed weights in the compile cache's folder; later starts map them instead of packing.

Runtime, beside `rlx.compiler.tensors`. It is an entry of the store, like a compiled program: `rlx cache` lists and
removes it, and the size limit evicts it. All matrices are in one large file, which processes map and share.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np

from rlx import platform
from rlx.backends.memory import Memory
from rlx.compiler.compile import Compiler
from rlx.errors import ArgumentError
from rlx.passes.layout import packed_rows
from rlx.store.cache import CompileCache
from rlx.store.entry import LargeFile
from rlx.store.folder import Damage
from rlx.store.key import CompileKey, digest_text, source_digest

DATA, LAYOUT = "weights.bin", "layout.json"
ALIGNMENT = 4096  # of a matrix in the file: each starts on a new page

# What reads and arranges weights before they are packed; the packing itself is among the generators of code.
_SOURCES = ("models/**/*.py", "weights/**/*.py", "compiler/tensors.py", "compiler/packed_cache.py")


class MappedWeights:
    """The mapped matrices of a packed-weight cache.

    Args:
        file: the file, open for reading; it may be closed afterwards.
        places: name -> offset in the file.
        memory: of the device; it may copy the file.

    Attributes:
        buffers: name -> memory from the packed matrix on.
        nbytes: size of the file.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, file: BinaryIO, places: Mapping[str, int], memory: Memory) -> None:
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        platform.current().read_ahead(self._map)
        self._whole = memory.adopt(np.frombuffer(self._map, np.uint8))
        self.nbytes = len(self._map)
        if self._whole.view() is None:  # a copy
            self._map.close()
        self.buffers = {name: self._whole.part(at) for name, at in places.items()}

    def close(self) -> None:
        """Unmaps the file; its buffers are invalid afterwards."""
        self.buffers = {}
        self._whole.close()
        with suppress(BufferError):  # views exist; the file is unmapped with the last one
            self._map.close()


class PackedWeightCache:
    """The packed-weight cache of one model, existing or not.

    Args:
        cache: the compile cache, which must have a store.
        key: see `weights_key`.
        memory: of the device that reads them.

    Raises:
        ArgumentError: the compile cache has no store on disk.
    """

    def __init__(self, cache: CompileCache, key: CompileKey, memory: Memory) -> None:
        if cache.store is None or cache.policy == "off":
            hint = "Leave keep_packed out, or use a cache with a store (RLX_CACHE=on)."
            raise ArgumentError("packed weights cannot be kept: the compile cache is off", hint=hint)
        self._store, self._policy, self._key, self._memory = cache.store, cache.policy, key, memory

    def find(self) -> MappedWeights | None:
        """The mapped weights, or None. A damaged entry is reported, and removed unless the cache is read-only."""
        return None if self._policy == "redo" else self._mapped()

    def _mapped(self) -> MappedWeights | None:
        entry = self._store.get(self._key, discard=self._policy == "on")
        if entry is None:
            return None
        try:
            with entry.open_file(DATA) as file:
                return MappedWeights(file, json.loads(entry.read(LAYOUT)), self._memory)
        except (OSError, Damage):  # evicted in the meantime
            return None

    def make(self, sizes: Mapping[str, int], pack: Callable[[str], memoryview]) -> MappedWeights | None:
        """Packs matrices into the file, one by one, and maps it. In memory is one matrix at a time.

        Args:
            sizes: name -> bytes of a packed matrix.
            pack: the packed matrix of this name; it need not be valid for longer than until the next call.

        Returns:
            None if the cache is read-only, or if it does not take the file; it has warned then.
        """
        if self._policy == "readonly":
            return None
        ends = list(accumulate(nbytes + -nbytes % ALIGNMENT for nbytes in sizes.values()))
        places = dict(zip(sizes, [0, *ends], strict=False))

        def pieces() -> Iterator[memoryview]:
            for name, nbytes in sizes.items():
                yield pack(name)
                yield memoryview(bytes(-nbytes % ALIGNMENT))

        files, data = {LAYOUT: json.dumps(places, indent=1)}, LargeFile(ends[-1] if ends else 0, pieces())
        self._store.put(self._key, files, replace=self._policy == "redo", large={DATA: data})
        return self._mapped()


def cache_of(
    name: str, stamps: Iterable[tuple[str, int, int]], compiler: Compiler, weights: Mapping[str, Any]
) -> PackedWeightCache:
    """The packed-weight cache of some weights, by the model's files, the layout of each weight, target and versions.

    Args:
        name: name of the model, for listings.
        stamps: path, size in bytes and modification time in nanoseconds of each of the model's files.
        weights: the manifest's table.
    """
    rows = digest_text(json.dumps(packed_rows(weights), sort_keys=True))
    options = {"files": [list(stamp) for stamp in stamps], "weights": rows, "readers": source_digest(None, _SOURCES)}
    key = compiler.key(kind="weights", name=name, options=options)
    return PackedWeightCache(compiler.cache, key, compiler.backend.memory)
