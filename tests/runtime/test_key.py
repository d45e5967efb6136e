"""Keys: equal exactly when their contents are, printed and read back, made without importing a compiler."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.store import key as keys
from rlx.store.key import CompileKey, diff, digest_text, flatten, source_digest, versions

pytestmark = pytest.mark.any_machine

leaf = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
)
values = st.recursive(
    leaf, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3), max_leaves=6
)
mappings = st.dictionaries(st.text(max_size=6), values, max_size=4)
compile_keys = st.builds(
    CompileKey,
    kind=st.sampled_from(["program", "pack", "runtime"]),
    name=st.text(max_size=8),
    graph=st.text("0123456789abcdef", max_size=8),
    phase=st.sampled_from(["", "prefill", "decode"]),
    bucket=values,
    states=mappings,
    target=mappings,
    profile=mappings,
    options=mappings,
    versions=mappings,
)


def canonical(key: CompileKey) -> str:
    """The oracle for equality: the text of what was put in, whatever its order."""
    return json.dumps(key.as_dict(), sort_keys=True)


# ---------------------------------------------------------------------------------------------------- equality


@given(compile_keys, compile_keys)
def test_digests_are_equal_exactly_when_contents_are(a: CompileKey, b: CompileKey) -> None:
    assert (a.digest == b.digest) == (canonical(a) == canonical(b))
    assert (a == b) == (a.digest == b.digest)
    assert hash(a) == hash(CompileKey(**a.as_dict()))


@pytest.mark.parametrize(
    ("a", "b"), [(1, True), (0, False), (1, 1.0), (None, ""), ([], {}), ("1", 1), ([1, [2]], [1, 2])]
)
def test_values_that_python_or_a_reader_confuses_differ(a: Any, b: Any) -> None:
    assert CompileKey("program", options={"x": a}) != CompileKey("program", options={"x": b})


def test_the_digest_is_stable() -> None:
    """A stored cache stays valid: this digest was computed once, by `sha256sum` over the canonical JSON."""
    key = CompileKey(
        "program", "tiny", "ab", "decode", [1, 1], {"k": "f16"}, {"level": "avx2"}, {}, {"x": None}, {"v": 1}
    )
    text = (
        '{"bucket":[1,1],"graph":"ab","kind":"program","name":"tiny","options":{"x":null},"phase":"decode",'
        '"profile":{},"states":{"k":"f16"},"target":{"level":"avx2"},"versions":{"v":1}}'
    )
    assert key.digest == digest_text(text) == "1239901b7354b41a06b1705d6e948155e887ee4a9f669eaa678ec08af1d042ba"


# ---------------------------------------------------------------------------------------------------- values


def test_a_key_does_not_follow_what_it_was_made_of() -> None:
    states: dict[str, Any] = {"k": ["f16"]}
    key = CompileKey("program", states=states)
    before = key.digest
    states["k"].append("q8_0")
    assert key.as_dict()["states"] == {"k": ["f16"]}
    assert CompileKey(**key.as_dict()).digest == before
    with pytest.raises(TypeError):
        key.states["k"] = "bf16"  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.kind = "pack"  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------- diff


@given(compile_keys, compile_keys)
def test_a_diff_is_empty_exactly_for_equal_keys(a: CompileKey, b: CompileKey) -> None:
    assert (diff(a, b) == []) == (a == b)
    assert sorted((p, str(y), str(x)) for p, x, y in diff(a, b)) == sorted(
        (p, str(x), str(y)) for p, x, y in diff(b, a)
    )
    assert {path for path, _, _ in diff(a, b)} <= {*flatten(a), *flatten(b)}


# ---------------------------------------------------------------------------------------------------- versions


def test_versions_name_everything_that_makes_code() -> None:
    import llvmlite
    import numba

    found = versions()
    assert found["numba"] == numba.__version__
    assert found["llvmlite"] == llvmlite.__version__
    assert found["generator"] == source_digest()
    assert str(found["llvm"]).startswith("sha256=")
    assert set(found) == {"rlx", "format", "generator", "python", "numba", "llvmlite", "llvm", "numba_settings"}


def test_the_digest_of_llvm_is_that_of_the_library() -> None:
    """What the package's record says is what is on disk: else a key would name a build that is not the one in use."""
    import base64
    import hashlib

    import llvmlite

    library = next((Path(llvmlite.__file__).parent / "binding").glob("libllvmlite.*"))
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    assert versions()["llvm"] == "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def test_settings_of_numba_that_change_code_are_in_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "CPU_NAME", "CPU_FEATURES", "BOUNDSCHECK", "ENABLE_AVX"):
        with monkeypatch.context() as patch:
            patch.setenv(f"NUMBA_{name}", "1")
            patch.setenv("NUMBA_NUM_THREADS", "7")
            assert versions()["numba_settings"] == {name: "1"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for part in ("ir", "passes", "backends/cpu/kernels", "runtime"):
        (tmp_path / part).mkdir(parents=True)
    for name in ("ir/graph.py", "backends/cpu/kernels/dot.py", "runtime/store.py"):
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("ir/graph.py", True),
        ("backends/cpu/kernels/dot.py", True),
        ("backends/cpu/kernels/new.py", True),
        ("runtime/store.py", False),
        ("backends/notes.txt", False),
        ("cli/cache.py", False),
    ],
)
def test_only_sources_that_write_code_invalidate(package: Path, name: str, counts: bool) -> None:
    digest = keys.source_digest.__wrapped__
    before = digest(package)
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_text("x = 2\n")
    assert (digest(package) != before) == counts
