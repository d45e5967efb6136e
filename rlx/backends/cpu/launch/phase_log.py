"""Notes when each worker arrives at the end of each region: a function in the place of `rlx_phase`.

CPU backend, for measurements only. A step calls `rlx_phase` through an address in its context, so the code of the
program stays as it is, and steps that are not measured take no time for this.
"""

from __future__ import annotations

import numpy as np

from rlx.backends.base import WorkerLog
from rlx.backends.cpu.launch.native import NativeCode
from rlx.backends.cpu.llvm_text import fill

# The counter of finished units that a region passes says which region it is. A row of the log, one for each worker,
# holds for each region the clock and the units.
_TEXT = """declare i64 @llvm.readcyclecounter()

define i1 @log_phase(ptr %pool, ptr %finished, i64 %count, i64 %total, i64 %worker) nounwind {
  %clock = call i64 @llvm.readcyclecounter()
  %at = ptrtoint ptr %finished to i64
  %skip = sub i64 %at, $ends
  %fields = mul i64 %skip, 2
  %row = mul i64 %worker, $row
  %start = inttoptr i64 $log to ptr
  %mine = getelementptr i8, ptr %start, i64 %row
  %place = getelementptr i8, ptr %mine, i64 %fields
  store i64 %clock, ptr %place, align 8
  %units.at = getelementptr i8, ptr %place, i64 8
  %units = load i64, ptr %units.at, align 8
  %sum = add i64 %units, %count
  store i64 %sum, ptr %units.at, align 8
  %phase = inttoptr i64 $phase to ptr
  %on = call i1 %phase(ptr %pool, ptr %finished, i64 %count, i64 %total, i64 %worker)
  ret i1 %on
}
"""


class PhaseLog:
    """The function, and the memory that it writes.

    Args:
        clock: the times of a program, int64 [workers, regions + 1].
        ends: the address of its counters of finished units, 8 bytes a region.
        phase: the address of `rlx_phase`.

    Attributes:
        address: of the function.
        log: what it notes.
    """

    def __init__(self, clock: np.ndarray, ends: int, phase: int) -> None:
        from rlx.backends.cpu.llvm import compile_module
        from rlx.backends.cpu.target import Target

        workers, regions = clock.shape[0], clock.shape[1] - 1
        rows = np.zeros((workers, regions, 2), np.int64)
        text = fill(_TEXT, ends=ends, row=16 * regions, log=rows.ctypes.data, phase=phase)
        code = compile_module(text, Target.host("generic")).code
        self._code = NativeCode([code], ["log_phase"])
        self.address = self._code.addresses["log_phase"]
        self.log = WorkerLog(clock, rows[..., 0], rows[..., 1])
