"""A model's weights under canonical names.

Last step of the weights stage before packing: `ModelWeights` joins an open file (`loader.py`) with the names of a
family (`names.py`), so that builders and packers never see a file's own names.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from rlx.errors import UnsupportedModelError, WeightError
from rlx.ir.dtypes import BF16, F16, F32, DType
from rlx.weights.loader import WeightLoader
from rlx.weights.mapped import Bytes, TensorInfo
from rlx.weights.names import canonical_names, file_names, unused_names

_FLOATS = (F32, F16, BF16)


class ModelWeights:
    """The tensors of one model.

    Args:
        loader: an open file; closed with this object.
        family: a key of `names.FAMILIES`.

    Attributes:
        names: canonical name -> the file's name.

    Raises:
        UnsupportedModelError: an unknown family, or a weight stored as integers or f64.
        WeightError: two tensors of the file mean the same.
    """

    def __init__(self, loader: WeightLoader, family: str) -> None:
        self.loader, self.family = loader, family
        self.names = canonical_names(loader, family)
        for name in self.names.values():
            _check_dtype(loader.tensors[name], loader)

    @property
    def format(self) -> str:
        """`gguf` or `safetensors`: the two differ in row order and norm offsets, see `names.py`."""
        return self.loader.format

    @property
    def unused(self) -> list[str]:
        """The file's names that are no weight of this family."""
        return unused_names(self.loader, self.family)

    def has(self, canonical: str) -> bool:
        return canonical in self.names

    def info(self, canonical: str) -> TensorInfo:
        """Type, shape and size; its `name` is the file's. `WeightError` if the file has no such tensor."""
        return self.loader.tensors[self._file_name(canonical)]

    def place(self, canonical: str) -> str:
        """Where a tensor is, or would be: the file and the tensor's name there, for messages."""
        name = self.names.get(canonical)
        if name is None:
            tried = file_names(canonical, self.family)
            name = tried[0] if self.format == "gguf" else tried[min(1, len(tried) - 1)]
        return f"{self.loader.path}, {name}"

    def raw(self, canonical: str) -> Bytes:
        """The bytes in the file: read-only 1-D uint8 view; `WeightError` if the file has no such tensor."""
        return self.loader.raw(self._file_name(canonical))

    def array(self, canonical: str) -> npt.NDArray[np.float32]:
        """A float tensor as an own float32 array of its shape; for norms, biases and other small tensors.

        Raises:
            WeightError: no such tensor, or it is quantized.
        """
        info = self.info(canonical)
        if info.dtype not in _FLOATS:
            raise WeightError(f"{canonical} has type {info.dtype}, expected f32, f16 or bf16", where=self.loader.path)
        return _to_float32(self.raw(canonical), info.dtype).reshape(info.shape)

    def release(self, canonical: str) -> None:
        """Give back the memory of the file's pages under the tensor."""
        self.loader.release(self._file_name(canonical))

    def close(self) -> None:
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _file_name(self, canonical: str) -> str:
        if canonical not in self.names:
            tried = ", ".join(file_names(canonical, self.family))
            raise WeightError(f"there is no tensor for {canonical}; names tried: {tried}", where=self.loader.path)
        return self.names[canonical]


def _check_dtype(info: TensorInfo, loader: WeightLoader) -> None:
    if not info.dtype.is_quantized and info.dtype not in _FLOATS:
        hint = "use a checkpoint in BF16, F16 or F32, or a GGUF file of the model"
        raise UnsupportedModelError(f"tensor {info.name!r} has type {info.dtype}", where=loader.path, hint=hint)


def _to_float32(raw: Bytes, dtype: DType) -> npt.NDArray[np.float32]:
    if dtype == BF16:  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f4" if dtype == F32 else "<f2").astype(np.float32)
