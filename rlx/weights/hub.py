"""Names of models on the Hugging Face hub, and the folder in which its tools keep what was downloaded.

Part of the weights stage, under `locate.py`. Nothing here uses the network; `pull.py` does.
"""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_name(text: str) -> bool:
    """Whether a text has the form of a repository's name, `org/repo`."""
    return _NAME.fullmatch(text) is not None and "--" not in text and ".." not in text


def folder(repo: str | None = None) -> Path:
    """The folder of all downloads, or that of a repository in it: where HF_HUB_CACHE or HF_HOME says."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    return cache if repo is None else cache / repo_folder_name(repo_id=repo, repo_type="model")


def snapshot(repo: str) -> Path | None:
    """The folder of what was downloaded of a repository's main branch; None if nothing was."""
    reference = folder(repo) / "refs" / "main"
    if not reference.is_file():
        return None
    found = folder(repo) / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return found if found.is_dir() else None
