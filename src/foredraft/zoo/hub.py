"""Hugging Face ids, through huggingface_hub and its usual cache: what is there is used without asking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foredraft.errors import DownloadError, ForedraftError, ModelError
from foredraft.zoo.local import check_dir

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.spm", "*.tiktoken"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats, and Mistral's second copy of the weights
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def fetch(repo_id: str, *, progress: bool) -> Path:
    """Return the snapshot directory of "org/name"; the network is used only if something is missing.

    Raises ModelError if there is no such model, it needs a licence accepted, or it has no safetensors;
    DownloadError if the hub cannot be reached.
    """
    local = _cached(repo_id)
    if local is not None and any((local / name).exists() for name in _TOKENIZERS):
        return local
    try:
        return check_dir(_download(repo_id, progress))
    except DownloadError:
        if local is None:
            raise
        return local  # no tokenizer in it: a draft head has none


def _cached(repo_id: str) -> Path | None:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return check_dir(_snapshot(repo_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, ForedraftError):
        return None


def _download(repo_id: str, progress: bool) -> Path:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        with _bars(progress):
            return _snapshot(repo_id)
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} asks you to accept its terms: do so at https://huggingface.co/{repo_id}, "
            "then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"there is no directory {repo_id!r}, and no such model on the Hugging Face hub for you: "
            "check the name, or run `hf auth login` if it is private"
        ) from error
    except Exception as error:
        # The hub's client lets the errors of its HTTP library through, and that library has changed twice.
        raise DownloadError(
            f"cannot fetch {repo_id} from the Hugging Face hub ({_first_line(error)}): check the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, or pass a local directory"
        ) from error


def _snapshot(repo_id: str, *, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        repo_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=local_files_only
    )
    return Path(found)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _bars(progress: bool) -> Iterator[None]:
    """Draw the hub's bars only when they were asked for."""
    from huggingface_hub import utils as hub  # its progress functions are public by its documentation alone

    if progress or hub.are_progress_bars_disabled():  # type: ignore[attr-defined]
        yield
        return
    hub.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hub.enable_progress_bars()  # type: ignore[attr-defined]
