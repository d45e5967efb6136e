"""`rlx doctor`: all sections, in the order of the report."""

from __future__ import annotations

from rlx.cli.doctor import installation, machine
from rlx.cli.doctor.findings import Findings
from rlx.cli.doctor.trial import trial


def examine(measure: bool = True) -> Findings:
    """Everything that is found on this machine. Nothing of it raises: what fails is a problem of the findings.

    Args:
        measure: also measure the read bandwidth and the arithmetic peaks, which takes some seconds.
    """
    findings = Findings()
    findings.add("versions", installation.versions)
    findings.add("environment", installation.environment)
    findings.add("packages", installation.packages)
    findings.add("extras", installation.extras)
    findings.add("cpu", machine.cpu, prevents=True)
    findings.add("threads", machine.threads, prevents=True)
    findings.add("memory", machine.memory)
    findings.add("cache", installation.cache)
    findings.add("models", installation.demo)
    findings.add("trial", trial(measure), prevents=True)
    return findings
