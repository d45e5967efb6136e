"""A session at rest, in memory and in a file.

Runtime, beside `session.py`, which makes snapshots and goes on from them. A file is NumPy's `.npz`: the arrays of the
states, the ids, and a header of JSON. Nothing in it is pickled, and `load` believes nothing that it has not checked;
whether a snapshot fits a model is for `Session.check` to say.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import SnapshotError

Array = np.ndarray[Any, Any]

FORMAT = 1  # of the file; a reader takes its own only
_HEADER, _IDS, _STATE = "rlx", "ids", "state/"
_ELEMENTS = ("float32", "float16", "uint16", "uint8")


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """A session at rest, immutable: restored, it goes on as the original would have.

    Attributes:
        ids: the tokens so far.
        arrays: by state: of a full cache its positions [heads, len(ids), head_dim]; of a ring the newest that it held,
            [heads, at most its capacity, head_dim]; of a recurrent state all of it. bf16 as uint16, heads of q8_0 and
            q4_0 as their blocks' bytes; read-only.
        formats: by state: kind, type and shape, which must be those of the session it is restored into.
        model: what tells one model from another.
    """

    ids: tuple[int, ...]
    arrays: Mapping[str, Array]
    formats: Mapping[str, str]
    model: str

    @property
    def position(self) -> int:
        """Where the next token goes."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and of the ids, at four each."""
        return sum(a.nbytes for a in self.arrays.values()) + 4 * len(self.ids)

    def __repr__(self) -> str:
        return f"<Snapshot of {self.position} tokens, {self.nbytes} bytes>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that another process can `load`: all of it or, if something fails, nothing.

        Raises:
            SnapshotError: the file cannot be written.
        """
        path = Path(path)
        header = {"format": FORMAT, "model": self.model, "formats": dict(self.formats)}
        arrays = {_STATE + name: value for name, value in self.arrays.items()}
        arrays[_HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        arrays[_IDS] = np.array(self.ids, np.int32)
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
                try:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
                except BaseException:
                    os.unlink(file.name)
                    raise
            os.replace(file.name, path)
        except OSError as error:
            raise SnapshotError(f"the snapshot cannot be written: {error.strerror}", where=path) from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Snapshot:
        """The snapshot in a file that `save` wrote.

        Raises:
            SnapshotError: there is no such file, or it is damaged, or something else, or of another version of rlx.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                if not zipfile.is_zipfile(file):  # of which NumPy would say how to unpickle it
                    raise ValueError("it is no .npz file")
                file.seek(0)
                with np.load(file, allow_pickle=False) as arrays:
                    return _checked({name: arrays[name] for name in arrays.files}, path)
        except OSError as error:
            raise SnapshotError(f"the snapshot cannot be read: {error.strerror or error}", where=path) from error
        except (ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            hint = "save it again from a session"
            raise SnapshotError(f"this is no snapshot, or a damaged one: {error}", where=path, hint=hint) from error


def _checked(arrays: dict[str, Array], path: Path) -> Snapshot:
    """What a file holds, as a snapshot; `ValueError` and its like where it is none."""
    header = json.loads(arrays.pop(_HEADER).tobytes())
    if header["format"] != FORMAT:
        hint = "save it again with this version of rlx"
        raise SnapshotError(f"its format is {header['format']!r}, expected {FORMAT}", where=path, hint=hint)
    ids, formats, model = arrays.pop(_IDS), header["formats"], header["model"]
    if ids.ndim != 1 or ids.dtype != np.int32 or (ids < 0).any():
        raise ValueError("the ids are no list of ids")
    if not isinstance(model, str) or not all(isinstance(f, str) for f in formats.values()):
        raise ValueError("the header is not what save writes")
    states = {name.removeprefix(_STATE): value for name, value in arrays.items()}
    for name, value in states.items():
        if value.dtype.name not in _ELEMENTS:
            raise ValueError(f"state {name!r} is of {value.dtype}")
        value.flags.writeable = False
    return Snapshot(tuple(ids.tolist()), states, dict(formats), model)
