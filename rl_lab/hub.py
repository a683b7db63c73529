"""Addresses of agents: `hf://owner/name[@revision]` on the Hugging Face Hub, `example://name` in this package.

A downloaded agent is a stranger's folder: only the files of an exported agent are fetched, as plain files, and
SECURITY.md says what its config may name. HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE work as in `huggingface_hub`.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from rl_lab.errors import LabError, MissingPackageError, closest, install_line, one_line

EXAMPLES = Path(__file__).resolve().parent / "agents"
HUB, EXAMPLE = "hf://", "example://"
# The files of an exported agent. A signature is not among them: it would be the author's.
FILES = (
    "config.yaml",
    "config/spec.json",
    "config/native.json",
    "agent.safetensors",
    "agent.onnx",
    "scores.json",
    "README.md",
    "dream.gif",
    "media/episodes/test/*.npz",
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"[\w.][\w./-]{0,127}")


def folder_of(address: str) -> Path:
    """Return the local folder of the agent at an address; LabError if there is none."""
    if address.startswith(EXAMPLE):
        return example(address.removeprefix(EXAMPLE))
    if address.startswith(HUB):
        return download(*parse(address))
    raise LabError(f"{address} is no address of an agent: write hf://owner/name or example://name")


def examples() -> list[str]:
    """Return the names of the agents in this package."""
    return sorted(file.parent.name for file in EXAMPLES.glob("*/config.yaml"))


def example(name: str) -> Path:
    if name not in examples():
        raise LabError(
            f"{EXAMPLE}{name}: no agent of this name comes with RL Lab.{closest(name, examples())}"
        )
    return EXAMPLES / name


def parse(address: str) -> tuple[str, str]:
    """Return repository and revision of an hf:// address; LabError if it has another form."""
    repository, at, revision = address.removeprefix(HUB).partition("@")
    if not _REPOSITORY.fullmatch(repository) or ".." in address or (at and not _REVISION.fullmatch(revision)):
        raise LabError(
            f"{address} is no address on the hub: write hf://owner/name or hf://owner/name@revision"
        )
    return repository, revision or "main"


def cache_folder() -> Path:
    """Return where downloaded agents are: $RL_LAB_CACHE, or ~/.cache/rl_lab."""
    given = os.environ.get("RL_LAB_CACHE")
    return (Path(given) if given else Path.home() / ".cache" / "rl_lab").expanduser()


@cache  # one request per process
def download(repository: str, revision: str) -> Path:
    """Fetch the files of an agent, and return their folder. Files that are there and unchanged are kept."""
    hub = _library()
    name = f"{repository}@{revision}".replace("/", "--")
    folder = cache_folder() / "hub" / name
    try:
        hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(FILES),
            local_dir=folder,  # plain files: the library's own cache has links, which a run folder must not have
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except Exception as error:  # of the network, the server or the file system
        raise LabError(f"{HUB}{repository}: {_reason(error, revision)}") from error
    if not (folder / "config.yaml").is_file():
        raise LabError(
            f"{HUB}{repository} is no agent of RL Lab: it has no config.yaml (rl-lab push writes one)"
        )
    return folder


def upload(folder: Path, repository: str, *, private: bool = False, message: str = "") -> str:
    """Send the files of an exported agent to the hub; create the repository if needed; return its address."""
    if not _REPOSITORY.fullmatch(repository):
        raise LabError(f"{HUB}{repository} is no address on the hub: write hf://owner/name")
    hub = _library()
    api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="rl-lab")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=list(FILES),
            commit_message=message or "An agent of RL Lab",
        )
    except Exception as error:
        raise LabError(f"{HUB}{repository}: {_reason(error)}") from error
    return str(getattr(done, "commit_url", "") or f"{HUB}{repository}")


def _library() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"hf:// needs huggingface_hub: {install_line('hub')}") from error
    # Its progress bars would break the lines that the verbs print.
    disable_progress_bars()
    return huggingface_hub


def _reason(error: Exception, revision: str = "main") -> str:
    """Return one sentence for what the library raised; it has a class for each answer of the server."""
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError"):
        return "there is no such repository, or you may not read it (HF_TOKEN has your access token)"
    if kind == "RevisionNotFoundError":
        return f"it has no revision '{revision}'"
    if kind in ("LocalTokenNotFoundError",) or "401" in str(error):
        return "the hub asks for an access token: set HF_TOKEN, or run hf auth login"
    if kind in ("OfflineModeIsEnabled", "LocalEntryNotFoundError"):
        return "it was not downloaded before, and the hub cannot be reached"
    return one_line(error)
