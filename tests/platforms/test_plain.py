"""The tests of workers, memory, files, confined processes and commands as on a system that has nothing special."""

from __future__ import annotations

from as_machine import passes

#: What no plain system can do is left out: locks that end with their process, folders by descriptor.
CHOSEN = [
    "tests/runtime/test_threads.py::test_callers_in_several_threads_queue",
    "tests/runtime/test_memory.py::test_closing_gives_the_memory_back",
    "tests/runtime/test_store.py::test_where_the_platform_has_no_descriptors_of_folders",
    "tests/runtime/test_store.py::test_the_default_folder",
    "tests/runtime/test_foreign_entries.py::test_what_is_no_code_is_compiled_again",
    "tests/text/test_confined.py",
    "tests/cli/test_prompt.py::test_a_pipe_is_put_before_the_prompt",
]


def test_with_every_piece_unavailable() -> None:
    passes(CHOSEN, RLX_PLATFORM="plain")
