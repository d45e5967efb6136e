"""A clip of audio as samples, from an array, a WAV file, or its bytes.

First step of the audio stage. Samples are read by the standard library's `wave`, which knows PCM only.
"""

from __future__ import annotations

import io
import os
import wave
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlx.errors import CUT_SHORT, AudioError, ResourceError
from rlx.json_file import read_bytes

Samples: TypeAlias = NDArray[np.float32]

RATE = 16_000  # samples a second that models take
MAX_SAMPLES = 3600 * RATE  # an hour: 90,000 rows, more than any context
MAX_BYTES = 8 * 48_000 * 3600  # of a WAV file
_CONVERT = f"convert it, for example `ffmpeg -i IN -ar {RATE} -ac 1 -c:a pcm_s16le OUT.wav`"


@dataclass(frozen=True, eq=False)
class Audio:
    """A clip of audio.

    Attributes:
        samples: float32 [count], 16,000 a second, from -1 to 1; read-only.
        digest: names the samples: equal clips have equal digests.
    """

    samples: Samples
    digest: bytes = field(repr=False)

    @staticmethod
    def of(value: Any) -> Audio:
        """The clip that a caller means.

        Args:
            value: float samples [count] at 16,000 a second, the path of a WAV file, its bytes, or a `Audio`. Several
                channels of a file become their mean.

        Raises:
            AudioError: it is none of these, empty, too long, not finite, no PCM file, or of another sample rate.
        """
        if isinstance(value, Audio):
            return value
        if isinstance(value, str | os.PathLike):
            return _of_samples(_decoded(read_bytes(Path(value).expanduser(), AudioError, MAX_BYTES), str(value)))
        if isinstance(value, bytes | bytearray | memoryview):
            return _of_samples(_decoded(bytes(value), None))
        return _of_samples(_array(value))

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / RATE


def _of_samples(samples: Samples) -> Audio:
    if not len(samples):
        raise AudioError("the audio has no samples")
    if len(samples) > MAX_SAMPLES:
        raise AudioError(f"the audio has {len(samples)} samples, expected at most {MAX_SAMPLES}", hint="cut it")
    if not np.isfinite(samples).all():
        raise AudioError("a sample is NaN or infinite")
    samples = np.ascontiguousarray(samples)
    samples.flags.writeable = False
    return Audio(samples, blake2b(samples.tobytes(), digest_size=16, person=b"audio").digest())


def _array(value: Any) -> Samples:
    hint = f"give float samples [count] at {RATE} a second, the path of a WAV file, or its bytes"
    try:
        array = np.asarray(value)
    except (ValueError, MemoryError) as error:
        raise AudioError("this is no array of samples", hint=hint) from error
    if array.dtype.kind != "f" or array.ndim != 1:
        found = f"an array of {array.dtype} {list(array.shape)}" if array.dtype != object else type(value).__name__
        raise AudioError(f"expected float samples [count], found {found}", hint=hint)
    return array.astype(np.float32)


def _decoded(data: bytes, where: str | None) -> Samples:
    """The samples of a WAV file, the mean of its channels."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate, count = (
                file.getsampwidth(),
                file.getnchannels(),
                file.getframerate(),
                file.getnframes(),
            )
            if rate != RATE:
                raise AudioError(f"the audio has {rate} samples a second, expected {RATE}", where=where, hint=_CONVERT)
            raw = file.readframes(count)
    except (wave.Error, EOFError, ValueError, OverflowError) as error:
        reason = str(error) or "it ends too early"
        raise AudioError(f"this is no WAV file with PCM samples: {reason}", where=where, hint=_CONVERT) from error
    except MemoryError as error:
        raise ResourceError("there is not enough memory for the audio", where=where) from error
    whole = len(raw) // (width * channels) * channels
    if whole < count * channels:
        what = f"the file ends after {whole // channels} of {count} samples"
        raise AudioError(what, where=where, hint=CUT_SHORT)
    mono: Samples = _numbers(raw, width, where).reshape(-1, channels).mean(1, dtype=np.float32)
    return mono


def _numbers(raw: bytes, width: int, where: str | None) -> Samples:
    """PCM samples of 1 to 4 bytes as numbers from -1 to 1."""
    if width == 1:  # unsigned
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:
        padded = np.zeros((len(raw) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        raw, width = padded.tobytes(), 4
    if width not in (2, 4):
        raise AudioError(f"samples of {8 * width} bits are not supported", where=where, hint=_CONVERT)
    return np.frombuffer(raw, f"<i{width}").astype(np.float32) / np.float32(2.0 ** (8 * width - 1))
