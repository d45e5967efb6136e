"""Access to the server: keys, the names under which the server is reached, and the pages that may use it.

Server stage, under `middleware.py`. It looks at nothing but the head of a request.
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


class Access:
    """Says which requests a server answers.

    Args:
        options: keys, host names, origins.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._digests = [_digest(key) for key in options.api_key]
        self._hosts = frozenset(options.allowed_host) if options.is_local else None
        self._origins = frozenset(options.cors_origin)

    def check(self, path: str, method: str, headers: Headers) -> str:
        """Looks at the head of a request.

        Returns:
            What tells the holders of different keys apart, see `owner`.

        Raises:
            ApiError: 403, it is for another name or of a page that may not use the server; 401, it has no valid key.
        """
        host, origin = headers.get("host"), headers.get("origin")
        if host and self._hosts is not None and not self._is_known(host.lower(), self._hosts):
            what = f"the server of this machine is not reached as {host[:200]!r}"
            hint = "use http://localhost, or start the server with --allowed-host NAME"
            raise ApiError(403, what, code="host_not_allowed", hint=hint)
        if origin is not None and not self._allows(origin, headers):
            what, hint = f"pages of {origin[:200]!r} may not use this server", "start it with --cors-origin ORIGIN"
            raise ApiError(403, what, code="origin_not_allowed", hint=hint)
        if not self._digests or (method == "OPTIONS" and origin is not None):
            return ""
        if path not in PUBLIC:
            self._check_key(_sent(headers))
        return self.owner(headers)

    def _check_key(self, sent: str) -> None:
        """Compares a key with those that there are, in constant time."""
        digest = _digest(sent)
        if not sum([hmac.compare_digest(digest, each) for each in self._digests]):
            what = "the API key is wrong" if sent else "the request has no API key"
            hint = "send the header Authorization: Bearer KEY, or X-Api-Key: KEY"
            raise ApiError(401, what, code="invalid_api_key", hint=hint, headers={"WWW-Authenticate": "Bearer"})

    def owner(self, headers: Headers) -> str:
        """Tells the holders of different keys apart; empty where no key is needed. It does not tell the key."""
        return _digest(_sent(headers)).hex() if self._digests else ""

    @staticmethod
    def _is_known(host: str, more: frozenset[str]) -> bool:
        """Whether this machine has a name.

        A web page anywhere may give its own name the address 127.0.0.1, and then read what the server answers (DNS
        rebinding). Its requests carry that name in the header Host. A server that is reached from elsewhere takes every
        name.
        """
        name = host if host.endswith("]") else re.sub(r":\d*$", "", host)
        return bool(_LOCAL_HOST.fullmatch(name)) or name in more or host in more

    def _allows(self, origin: str, headers: Headers) -> bool:
        """Whether a page of this origin may use the server: those of this machine may, and those that were named."""
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        try:
            parts = urlsplit(origin.lower())
        except ValueError:  # such as http://[
            return False
        if f"{parts.scheme}://*" in self._origins or parts.netloc == headers.get("host", "").lower():
            return bool(parts.netloc)
        return parts.scheme in ("http", "https") and bool(_LOCAL_HOST.fullmatch(parts.hostname or ""))

    def cors(self, headers: Headers) -> dict[str, str]:
        """The headers of a response to a page; none for one that may not ask."""
        origin = headers["origin"]
        if not self._allows(origin, headers):
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


def _sent(headers: Headers) -> str:
    """The key in the head of a request, or ""."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
