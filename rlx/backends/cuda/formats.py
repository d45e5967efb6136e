"""Values in a card's memory as numbers, for `RLX_VERIFY`: packed matrices, over the plain formats of the reference."""

from __future__ import annotations

from math import prod

import numpy as np

from rlx.backends.cuda import layouts
from rlx.backends.reference.formats import Array, Bytes, Formats, Shape
from rlx.ir.dtypes import DType


class CardFormats(Formats):
    """Reads values as the kernels of a card lay them out."""

    def read_weight(self, dtype: DType, raw: Bytes, shape: Shape, layout: str) -> Array:
        if layout != self.layouts.matrices:
            return super().read_weight(dtype, raw, shape, layout)
        matrices = raw.reshape(prod(shape[:-2]), -1)
        values = [layouts.unpack(dtype, matrix, *shape[-2:]) for matrix in matrices]
        return np.stack(values).reshape(shape)

    def read_table(self, dtype: DType, raw: Bytes, shape: Shape, layout: str, ids: Array) -> Array:
        if layout == self.layouts.matrices:
            return self.read_weight(dtype, raw, shape, layout)[ids]
        return super().read_table(dtype, raw, shape, layout, ids)
