"""Questions to the Hugging Face hub by HTTP, and what it refuses as errors with a name.

Part of the weights stage, under `repository.py` and `download.py`. The hub's library knows its environment
(HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) and gives the client. An answer is read piece by piece and up to a limit: a
hub may send without end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlx.env import size
from rlx.errors import DownloadError

TIMEOUT = 30.0  # seconds without a byte


@contextmanager
def asked(url: str, where: str, headers: dict[str, str] | None = None) -> Iterator[Any]:
    """The hub's answer to a GET request while it comes, with whatever status; redirects are followed.

    Args:
        url: behind the address of the hub.
        where: what is asked for, for messages.
    """
    from huggingface_hub import constants, get_session, get_token

    sent = {"Accept-Encoding": "identity", **(headers or {})}
    if token := get_token():
        sent["Authorization"] = f"Bearer {token}"
    with get_session().stream("GET", f"{constants.ENDPOINT}/{url}", headers=sent, timeout=TIMEOUT) as answer:
        if answer.is_error and answer.status_code != 416:
            raise _refused(answer.status_code, answer.headers, where)
        yield answer


def read(url: str, where: str, most: int, seconds: float) -> bytes:
    """The whole answer to a question.

    Args:
        most: bytes of it.
        seconds: until its last byte.

    Raises:
        DownloadError: the hub refuses, or its answer is too long or takes too long.
    """
    end, body = time.monotonic() + seconds, bytearray()
    with named_http_errors(where), asked(url, where) as answer:
        for chunk in answer.iter_raw():
            body += chunk
            if len(body) > most:
                what = f"the hub's list of files has more than {size(most)}"
                raise DownloadError(what, where=where, hint="download the files with another tool, and give their path")
            if time.monotonic() > end:
                what = f"the hub's answer takes more than {seconds:g} s"
                raise DownloadError(what, where=where, hint="try again later")
    return bytes(body)


@contextmanager
def named_http_errors(where: str, broken: list[str] | None = None) -> Iterator[None]:
    """A connection to the hub that does not come becomes a `DownloadError`.

    Args:
        broken: takes the reason of a connection that breaks, which then is no error.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        hint = "unset HF_HUB_OFFLINE"
        raise DownloadError("the hub's tools are told to work offline", where=where, hint=hint) from error
    except _transport_errors() as error:
        reason = str(error) or type(error).__name__
        if broken is None:
            what = f"there is no connection to {constants.ENDPOINT}: {reason}"
            raise DownloadError(what, where=where, hint="check the network, or HF_ENDPOINT") from error
        broken.append(reason)


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the hub's HTTP client raises where there is no answer, whichever client it is."""
    from huggingface_hub.errors import HfHubHTTPError

    base = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError" and issubclass(kind, Exception))
    client = sys.modules[base.__module__.partition(".")[0]]
    return base, client.InvalidURL, client.StreamError


def _refused(status: int, headers: Any, where: str) -> DownloadError:
    token = "set HF_TOKEN to a token of an account that may read it"
    if status == 403 or headers.get("X-Error-Code") == "GatedRepo":
        hint = f"accept its terms on its page at the hub, and {token}"
        return DownloadError("access to the repository is restricted", where=where, hint=hint)
    if status == 401 and headers.get("X-Error-Message", "").startswith("Invalid credentials"):
        return DownloadError("the hub refuses the token", where=where, hint=token)
    if status in (401, 404):
        what = "the hub has no such repository, or it is private"
        what = f"the hub has no such file ({status})" if "," in where else what
        return DownloadError(what, where=where, hint=f"check the name; if it is private, {token}")
    return DownloadError(f"the hub answers {status}", where=where, hint="try again later")
