"""Access to the server: keys, the names under which the server is reached, and the pages that may use it.

Server stage. Each check looks at a request's head and says what is wrong with it; `middleware.py` asks
them in order.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from rlx.serve.errors import ApiError
from rlx.serve.options import ServerOptions

PUBLIC = frozenset({"/", "/docs", "/health", "/v1/health", "/ping", "/favicon.ico"})
"""Paths that need no key: they tell nothing about the model or its users."""

_LOCAL_HOST = re.compile(r"(?:[\w-]+\.)*localhost|127(?:\.\d{1,3}){3}|\[?::1\]?")


class Keys:
    """The keys that clients must send, in constant time of comparison.

    Args:
        keys: none for no check.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [_digest(key) for key in keys]

    def problem(self, path: str, headers: Headers) -> ApiError | None:
        """A 401 if the path needs a key and none of the headers has one."""
        if not self._digests or path in PUBLIC:
            return None
        sent = _sent(headers)
        digest = _digest(sent)
        if sum([hmac.compare_digest(digest, each) for each in self._digests]):
            return None
        what = "the API key is wrong" if sent else "the request has no API key"
        hint = "send the header Authorization: Bearer KEY, or X-Api-Key: KEY"
        return ApiError(401, what, code="invalid_api_key", hint=hint, headers={"WWW-Authenticate": "Bearer"})

    def owner(self, headers: Headers) -> str:
        """Tells the holders of different keys apart; empty where no key is needed. It does not tell the key."""
        return _digest(_sent(headers)).hex() if self._digests else ""


def _sent(headers: Headers) -> str:
    """The key in the head of a request, or ""."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Names:
    """The names under which a server of this machine may be reached.

    A web page anywhere may give its own name the address 127.0.0.1, and then read what the server answers (DNS
    rebinding). Its requests carry that name in the header Host.

    Args:
        options: a server that is reached from elsewhere takes every name.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._is_local, self._more = options.is_local, frozenset(options.allowed_host)

    def problem(self, headers: Headers) -> ApiError | None:
        """A 403 if the request is for another name."""
        host = headers.get("host")
        if not self._is_local or not host or self._is_known(host.lower()):
            return None
        what = f"the server of this machine is not reached as {host[:200]!r}"
        hint = "use http://localhost, or start the server with --allowed-host NAME"
        return ApiError(403, what, code="host_not_allowed", hint=hint)

    def _is_known(self, host: str) -> bool:
        name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
        return bool(_LOCAL_HOST.fullmatch(name)) or name in self._more or host in self._more


class Origins:
    """The pages that may use the server from a browser: those of this machine, and those that were named.

    Args:
        allowed: origins; `*` for all. The host of an origin may be `*`.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._all = "*" in allowed
        self._allowed = frozenset(allowed)

    def allows(self, origin: str, headers: Headers) -> bool:
        """Whether a page of this origin may use the server."""
        if self._all or origin.lower() in self._allowed:
            return True
        try:
            parts = urlsplit(origin.lower())
        except ValueError:  # such as http://[
            return False
        if f"{parts.scheme}://*" in self._allowed or parts.netloc == headers.get("host", "").lower():
            return bool(parts.netloc)
        return parts.scheme in ("http", "https") and bool(_LOCAL_HOST.fullmatch(parts.hostname or ""))

    def problem(self, headers: Headers) -> ApiError | None:
        """A 403 if a page asks that may not."""
        origin = headers.get("origin")
        if origin is None or self.allows(origin, headers):
            return None
        what, hint = f"pages of {origin[:200]!r} may not use this server", "start it with --cors-origin ORIGIN"
        return ApiError(403, what, code="origin_not_allowed", hint=hint)

    def headers(self, headers: Headers) -> dict[str, str]:
        """The headers of a response to a page; none if no page asks, or one that may not."""
        origin = headers.get("origin")
        if origin is None or not self.allows(origin, headers):
            return {}
        found = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Expose-Headers": "X-Request-Id, X-Rlx-Ignored, Server-Timing, Retry-After, Retry-After-Ms",
            "Vary": "Origin",
        }
        if "access-control-request-method" in headers:
            found["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
            found["Access-Control-Allow-Headers"] = headers.get("access-control-request-headers", "*")
            found["Access-Control-Max-Age"] = "600"
            if "access-control-request-private-network" in headers:
                found["Access-Control-Allow-Private-Network"] = "true"
        return found
