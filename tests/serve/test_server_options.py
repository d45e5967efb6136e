"""The options of the server: what they refuse, and where keys come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlx.errors import ArgumentError
from rlx.serve.options import ServerOptions

KEY, OTHER = "sk-0123456789", "other-key-of-a-file"


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n\n{OTHER}\n{KEY}\n")
    monkeypatch.setenv("RLX_API_KEY", "key-of-the-environment")
    found = ServerOptions(api_key=(KEY,), api_key_file=file).resolved()
    assert found.api_key == (KEY, OTHER, "key-of-the-environment")
    assert found.resolved() == replace(found)


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    assert KEY not in repr(ServerOptions(api_key=(KEY,)))
    (tmp_path / "keys").write_text("bad key here\n")
    with pytest.raises(ArgumentError, match="line 1") as caught:
        ServerOptions(api_key_file=tmp_path / "keys").resolved()
    assert "bad key here" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str | None) -> None:
    """Otherwise a mistyped name would open the server to everybody."""
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ArgumentError, match="keys"):
        ServerOptions(api_key_file=tmp_path / "keys").resolved()


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ((), True), (("127.0.0.1",), True), (("127.0.0.2", "localhost"), True), (("[::1]",), True),
        (("0.0.0.0",), False), (("127.0.0.1", "::"), False),
    ],
)  # fmt: skip
def test_what_listens_on_this_machine_only(host: tuple[str, ...], is_local: bool) -> None:
    assert ServerOptions(host=host).is_local is is_local
