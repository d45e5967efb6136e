"""`rlx doctor`: the CPU with what rlx uses of it, threads, and memory."""

from __future__ import annotations

import os
import warnings
from platform import machine as this_machine

from rlx import backends, env, platform
from rlx.backends.host import HOST
from rlx.cli.doctor.findings import Facts, Findings
from rlx.compiler.limits import worker_count
from rlx.compiler.tuned import machine
from rlx.engine.kv.pool_size import available_memory
from rlx.platform import cpu_count, usable_cpus

_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_BUSY = 0.5  # load per CPU from which measurements say little


def cpu(findings: Findings) -> Facts:
    """The processor, the target, and the features that its code uses and does not use."""
    device = backends.backend()
    facts: Facts = {"model": machine(), "architecture": this_machine(), "levels": device.levels()}
    with findings.noting("RLX_TARGET", prevents=True):
        target = device.target()
        use, triple = device.feature_use(target), target.describe()["triple"]
        facts |= {"level": target.level, "chosen_by": env.target() and "RLX_TARGET", "triple": triple}
        facts |= {"used": list(use.used), "unused": use.unused, "lacking": list(use.lacking)}
        _widest(findings, target.level, facts["levels"])
    return facts


def _widest(findings: Findings, level: str, levels: list[str]) -> None:
    """Notes a level that the CPU has and the target leaves out."""
    if level == levels[-1]:
        return
    if env.target():
        findings.problem(
            f"RLX_TARGET={env.target()} chooses level {level}, this CPU has {levels[-1]}", "unset RLX_TARGET"
        )
    elif levels[-1] == "amx":
        hint = "ask whoever runs this machine or container for it (Linux 5.16 or newer; arch_prctl must be allowed)"
        findings.problem("the operating system does not permit the CPU's tile registers to this process", hint)


def threads(findings: Findings) -> Facts:
    """The number of worker threads, and why it is that."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        workers = worker_count()
    for warning in caught:
        findings.problem(str(warning.message), "unset RLX_THREADS")
    system, logical, cores = platform.current(), os.cpu_count() or 1, cpu_count()
    quota, allowed = system.cpu_quota(), len(system.allowed_cpus())
    facts: Facts = {
        "workers": workers,
        "logical_cpus": logical,
        "allowed_cpus": allowed,
        "cores": cores,
        "quota_cpus": None if quota == float("inf") else quota,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    facts["reason"] = _reason(facts)
    if facts["load"] is not None and facts["load"] > _BUSY * usable_cpus():
        findings.problem(
            f"the machine is busy: load {facts['load']:.1f} on {usable_cpus():g} CPUs", "measure when it is idle"
        )
    return facts


def _reason(facts: Facts) -> str:
    """Why there are so many workers."""
    if env.threads() is not None:
        return "RLX_THREADS says so"
    quota, cores, allowed, logical = (facts[n] for n in ("quota_cpus", "cores", "allowed_cpus", "logical_cpus"))
    if quota is not None and int(quota) <= cores:
        return f"the cgroup of this process may use {quota:g} CPUs"
    which = "one for each core" if allowed == logical else f"one for each core among {allowed} of {logical} CPUs"
    smt = "; hyper-threads share the arithmetic of a core" if allowed > cores else ""
    return f"{which}{', which is the affinity of this process' if allowed < logical else ''}{smt}"


def memory(findings: Findings) -> Facts:
    """Memory of the machine and of this process, and huge pages."""
    huge = platform.current().huge_pages()
    if huge == "never":
        hint = f"echo madvise > {_HUGE_PAGES} (as root); weights are then read with fewer misses of the TLB"
        findings.problem("transparent huge pages are off", hint)
    return {
        "total_bytes": platform.current().total_memory(),
        "available_bytes": available_memory(HOST),
        "huge_pages": huge,
    }
