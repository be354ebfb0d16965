"""Download diffusers pipelines from the Hugging Face hub into its cache.

`fetch_pipeline` downloads the files that a family reads: of each component the configuration and
one set of weights, without copies in other formats and precisions. `fetch_configs` downloads only
the configuration of the transformers. Both work offline if the cache has the files.

huggingface_hub keeps only complete files, so a run that is killed would lose all files in progress,
which can be dozens of gigabytes. Large files are therefore written to `<digest>.incomplete` in the
cache's folder for blobs, continued from there, and checked against their digest.

Environment variables of huggingface_hub apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlparse

from filelock import FileLock, Timeout
from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    logging,
)

from gracetune.errors import ModelError, ModelUnavailableError
from gracetune.events.types import Notice, StageProgress
from gracetune.models.registry import FAMILIES, MODEL_INDEX, family_info
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from gracetune.events.dispatcher import Emit

HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base class of all errors of the HTTP library, which differs between versions of
huggingface_hub."""
UNREACHABLE = (HTTP_ERROR, OfflineModeIsEnabled, LocalEntryNotFoundError, ConnectionError)
"""Errors after which the cache is tried, unless the hub has given an answer (HfHubHTTPError)."""
STAGE = "downloading"
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".ot"),
    *(".onnx", ".onnx_data", ".pb", ".xml", ".tflite"),
)
WEIGHT_NAMES = ("diffusion_pytorch_model", "model", "pytorch_model")
"""Starts of the names of weights that diffusers and transformers load."""
WITHOUT_MODEL = ("tokenizer", "scheduler", "processor", "feature_extractor")
"""Parts of the names of components that have no weights."""
NUM_THREADS = 4
NUM_ATTEMPTS = 5
"""Attempts to continue a file before an error, since the last byte that has arrived."""
RETRY_S = 1.0
"""Half of the seconds before the second attempt. Each further wait is twice as long."""
MEGABYTE = 1_000_000
PARTIAL_CONTENT = 206
HASH_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class HubModel:
    """A pipeline on the hub, and the parts of it that a run needs."""

    name: str
    revision: str | None
    family: str
    setting: str
    """The run-file setting that names it, for errors."""
    without_weights: frozenset[str] = frozenset()
    """Components whose weights come from another file. Only their configuration is needed."""

    @property
    def page(self) -> str:
        """The address of the model's page."""
        return f"{constants.ENDPOINT}/{self.name}"

    @property
    def storage(self) -> Path:
        """The folder of the model in huggingface_hub's cache."""
        folder = repo_folder_name(repo_id=self.name, repo_type="model")
        return Path(constants.HF_HUB_CACHE).expanduser() / folder

    def components(self, index: Mapping[str, Any]) -> list[str]:
        """Return the names of the components that the family reads."""
        unused = family_info(self.family).unused_components
        return [n for n, entry in index.items() if has_component(entry) and n not in unused]


def has_component(entry: object) -> bool:
    """Return True if an entry of `model_index.json` names a component's package and class."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str) for x in entry)


def is_hub_name(text: str) -> bool:
    """Return True if a text can be a name on the hub, such as `owner/model`."""
    return HUB_NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def fetch_pipeline(model: HubModel, emit: Emit, *, is_first: bool = True) -> Path:
    """Return the folder of a pipeline in the cache, after downloading what is missing.

    One process of a machine downloads; others wait for it. `is_first` is False for all ranks of a
    machine but one: they start a second later, so that the rank that shows progress downloads.
    """
    if (folder := _pinned(model)) is not None:
        return folder
    if constants.HF_HUB_OFFLINE:  # without a lock: a shared cache may be read-only
        return _use_cache(model, OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), emit)
    with _explained(model):
        if not is_first:
            time.sleep(1)
        with _only_process(model, emit):
            try:
                folder = _fetch_index(model).parent
                index = _read_index(folder, model)
                listed = _list_files(model, folder.name)
            except UNREACHABLE as error:
                if _is_answer(error):
                    raise
                return _use_cache(model, error, emit)
            _check_pipeline(index, model)
            needed = needed_files(listed, index, model)
            _download(model, folder, {path: listed[path] for path in needed}, emit)
    return folder


def fetch_configs(model: HubModel) -> Path:
    """Return a folder with `model_index.json` and the configuration of each transformer.

    They are a few kilobytes; weights are not downloaded.
    """
    with _explained(model):
        try:
            folder = _fetch_index(model).parent
            for name in model.components(_read_index(folder, model)):
                if name.startswith(("transformer", "unet")):
                    _fetch_small(model, f"{name}/config.json", folder.name)
        except UNREACHABLE as error:
            if _is_answer(error):
                raise
            raise ModelUnavailableError(_not_cached(model, error)) from error
    return folder


# Choosing files


def _check_pipeline(index: Mapping[str, Any], model: HubModel) -> None:
    """Raise if a model is not of the family, before gigabytes of it are downloaded."""
    known, found = family_info(model.family).pipelines, index.get("_class_name")
    if not known or found in known:
        return
    others = [name for name, info in FAMILIES.items() if found in info.pipelines]
    fix = f"Set model.family: {others[0]}, or name another model." if others else "Name another."
    raise ModelError(
        f"{model.setting} is {model.name!r}, which holds a {found}, but {model.family} reads "
        f"{' or '.join(known)}. {fix}"
    )


def needed_files(
    listed: Mapping[str, RepoFile], index: Mapping[str, Any], model: HubModel
) -> list[str]:
    """Return the paths of the files in a repository that the family reads."""
    needed = [MODEL_INDEX]
    for name in model.components(index):
        files = [path.partition("/")[2] for path in listed if path.startswith(f"{name}/")]
        names = [file for file in files if "/" not in file]
        if not names:
            raise ModelError(
                f"{model.setting} is {model.name!r}, whose {MODEL_INDEX} names {name}, but it has "
                f"no folder {name}. Name another model, or another model.revision."
            )
        weights = choose_weights(names)
        others = [n for n in names if not n.endswith((*WEIGHT_SUFFIXES, ".index.json"))]
        indices = [f"{_stem(w)}.index.json" for w in weights]
        others += [n for n in dict.fromkeys(indices) if n in names]
        if name in model.without_weights:
            weights = []
        elif not weights and _has_weights(name) and any(_is_weights(n) for n in names):
            found = ", ".join(sorted(n for n in names if _is_weights(n)))
            raise ModelError(
                f"{model.setting} is {model.name!r}, whose {name} has only {found}. gracetune "
                "loads safetensors files without a variant in their name. Name another model or "
                "model.revision, or a folder of your own."
            )
        needed += [f"{name}/{file}" for file in (*others, *weights)]
    return needed


def choose_weights(names: Iterable[str]) -> list[str]:
    """Return the weights that diffusers loads by default: safetensors, else .bin, no variants."""
    for suffix in (".safetensors", ".bin"):
        plain = [n for n in names if n.endswith(suffix) and "." not in n.removesuffix(suffix)]
        if known := [n for n in plain if n.startswith(WEIGHT_NAMES)]:
            return sorted(known)
    return []


def missing_files(folder: Path, index: Mapping[str, Any], model: HubModel) -> list[str]:
    """Return the files that a cached pipeline lacks, as far as its own files name them."""
    missing = []
    for name in model.components(index):
        part = folder / name
        names = [path.name for path in part.iterdir() if path.exists()] if part.is_dir() else []
        if not _has_weights(name):
            expected = ["scheduler_config.json"] if name == "scheduler" else []
            missing += [f"{name}/{n}" for n in expected if n not in names]
            missing += [f"{name}/"] if not names and not expected else []
            continue
        missing += [] if "config.json" in names else [f"{name}/config.json"]
        if name in model.without_weights:
            continue
        weights = choose_weights(names)
        shards = _shard_index(names, weights)
        if shards is not None:
            content = json.loads((part / shards).read_text())
            needed = sorted(set(content["weight_map"].values()))
            missing += [f"{name}/{n}" for n in needed if n not in names]
        elif not weights:
            is_encoder = index[name][0] == "transformers"
            start = "model" if is_encoder else "diffusion_pytorch_model"
            missing.append(f"{name}/{start}.safetensors")
    return missing


def _shard_index(names: Iterable[str], weights: Iterable[str]) -> str | None:
    """Return the index of the weights' parts, or None if they are whole; as in `choose_weights`."""
    indices = sorted(n for n in names if n.endswith(".index.json") and n.count(".") == 3)
    safe = [n for n in indices if n.endswith(".safetensors.index.json")]
    if any(n.endswith(".safetensors") for n in weights):
        indices = safe
    return next(iter(safe or indices), None)


def _has_weights(component: str) -> bool:
    return not any(part in component for part in WITHOUT_MODEL)


def _is_weights(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)


def _stem(name: str) -> str:
    """Return the name of all parts of a file that was split: without `-00001-of-00003`."""
    return re.sub(r"-\d+-of-\d+(?=\.)", "", name)


# Reading the hub and its cache


def _fetch_index(model: HubModel) -> Path:
    """Return the pipeline's index. Its folder is named by the commit of the revision."""
    _check_reachable()
    return _fetch_small(model, MODEL_INDEX, model.revision)


def _fetch_small(model: HubModel, path: str, revision: str | None) -> Path:
    bar: Any = _NoBar
    return Path(hf_hub_download(model.name, path, revision=revision, tqdm_class=bar))


def _check_reachable() -> None:
    """Raise if the hub does not answer. huggingface_hub would try for half a minute."""
    for attempt in range(2):
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            break
        except HTTP_ERROR:
            if attempt:
                raise


def _read_index(folder: Path, model: HubModel) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / MODEL_INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder / MODEL_INDEX} of {model.name} cannot be read ({error}). Delete it, and "
            "start the same command again."
        ) from error
    return index


def _list_files(model: HubModel, commit: str) -> dict[str, RepoFile]:
    tree = HfApi().list_repo_tree(model.name, recursive=True, revision=commit)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _pinned(model: HubModel) -> Path | None:
    """Return the cached folder if `model.revision` is a commit, which cannot change."""
    if model.revision is None or not COMMIT.fullmatch(model.revision):
        return None
    folder = model.storage / "snapshots" / model.revision
    if not (folder / MODEL_INDEX).is_file():
        return None
    return None if missing_files(folder, _read_index(folder, model), model) else folder


def _use_cache(model: HubModel, error: Exception, emit: Emit) -> Path:
    """Return the cached folder without asking the hub; raise if it is not complete."""
    revision = model.revision or constants.DEFAULT_REVISION
    ref = model.storage / "refs" / revision
    commit = ref.read_text() if ref.is_file() else revision
    folder = model.storage / "snapshots" / commit
    if not (folder / MODEL_INDEX).is_file():
        raise ModelUnavailableError(_not_cached(model, error)) from error
    missing = missing_files(folder, _read_index(folder, model), model)
    reason, fix = _why_offline(model, error)
    if missing:
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        count = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        raise ModelUnavailableError(
            f"{model.setting} is {model.name!r}, whose copy in the cache lacks {count} ({names}), "
            f"and {reason}. {fix}"
        ) from error
    if not constants.HF_HUB_OFFLINE:
        emit(Notice(f"model: {reason}; using the cached {model.name}", level="warning"))
    return folder


def _not_cached(model: HubModel, error: Exception) -> str:
    reason, fix = _why_offline(model, error)
    return (
        f"{model.setting} is {model.name!r}, which is neither a folder here nor in the cache "
        f"{constants.HF_HUB_CACHE}, and {reason}. {fix}"
    )


def _why_offline(model: HubModel, error: Exception) -> tuple[str, str]:
    """Return why the hub was not asked, and what to do."""
    if constants.HF_HUB_OFFLINE:
        reason, fix = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
    else:
        # An error of the cache has the error of the connection as its cause.
        cause = error.__cause__ or error
        reason = f"{constants.ENDPOINT} cannot be reached ({_first_line(cause)})"
        fix = "connect to the internet"
    copied = f"copy the folder that `hf download {model.name}` prints on a machine that is"
    return reason, f"Either {fix} to download it, or {copied} online, and name it in model.path."


@contextmanager
def _only_process(model: HubModel, emit: Emit) -> Iterator[None]:
    """Let one process at a time download a model, and say so if this one has to wait."""
    folder = model.storage.parent / ".locks" / model.storage.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"The cache of the hub, {model.storage.parent}, cannot be written "
            f"({error.strerror}). Set HF_HOME to a folder that you may write to, or set "
            "HF_HUB_OFFLINE=1 if it has the model."
        ) from error
    lock = FileLock(folder / "gracetune.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        emit(Notice(f"model: waiting for another process that downloads {model.name}"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# Downloading


def _download(model: HubModel, folder: Path, files: Mapping[str, RepoFile], emit: Emit) -> None:
    """Download files that the cache does not have, several at a time."""
    todo = {path: file for path, file in files.items() if not (folder / path).exists()}
    if not todo:
        return
    blobs = model.storage / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    kept = {path: _partial_size(blobs, file) for path, file in todo.items()}
    nbytes = sum(file.size - kept[path] for path, file in todo.items())
    free = shutil.disk_usage(blobs).free
    if nbytes > free:
        raise ModelError(
            f"{model.name} needs {format_bytes(nbytes)} more on the disk, but {blobs.parent} has "
            f"{format_bytes(free)} free. Free some space, or set HF_HOME to a folder on another "
            "disk."
        )
    again = f", {format_bytes(sum(kept.values()))} are here already" if any(kept.values()) else ""
    emit(Notice(f"model: downloading {format_bytes(nbytes)} of {model.name}{again}"))
    progress = _Progress(nbytes, emit)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        jobs = [
            threads.submit(_fetch_file, model, folder.name, path, file, progress)
            for path, file in sorted(todo.items(), key=lambda item: -item[1].size)
        ]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
            for job in jobs:
                if job.done():
                    job.result()
        except BaseException:  # also Ctrl-C: the threads would finish gigabytes first
            progress.stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    progress.finish()


def _fetch_file(
    model: HubModel, commit: str, path: str, file: RepoFile, progress: _Progress
) -> None:
    is_large = file.lfs is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    if is_large and file.lfs is not None:
        blob = model.storage / "blobs" / file.lfs.sha256
        if not blob.exists():
            url = hf_hub_url(model.name, path, revision=commit)
            _fetch_blob(model, url, blob, file, progress)
    # Links a blob that is there into the snapshot's folder, and downloads a small file, or one
    # that is too large for the hub's plain downloads.
    _fetch_small(model, path, commit)
    if not is_large:
        progress.add(file.size)


def _fetch_blob(model: HubModel, url: str, blob: Path, file: RepoFile, progress: _Progress) -> None:
    """Download a large file, from the last byte that is here."""
    partial = blob.with_name(f"{blob.name}.incomplete")
    attempt = 0
    while True:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            _continue_file(url, partial, file.size, progress)
            break
        except HTTP_ERROR as error:
            attempt = 1 if partial.exists() and partial.stat().st_size > before else attempt + 1
            if _is_answer(error) or attempt >= NUM_ATTEMPTS:
                raise
            progress.stopped.wait(RETRY_S * 2**attempt)
    digest = hashlib.sha256()
    with partial.open("rb") as opened:
        while chunk := opened.read(HASH_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != blob.name:
        partial.unlink()
        raise ModelError(
            f"A file of {model.name} arrived damaged ({url}): its SHA-256 differs from the hub's. "
            "Start the same command again to download it once more."
        )
    os.replace(partial, blob)


def _continue_file(url: str, partial: Path, size: int, progress: _Progress) -> None:
    """Append the missing bytes to a partial file.

    huggingface_hub's own function loses up to 10 MB when the connection is cut.
    """
    start = partial.stat().st_size if partial.exists() else 0
    if start >= size:
        return
    location = get_hf_file_metadata(url).location
    headers = build_hf_headers() | {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    if urlparse(location).netloc != urlparse(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for its storage
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with (
        get_session().stream("GET", location, headers=headers, timeout=timeout) as response,
        partial.open("ab") as file,
    ):
        if response.status_code >= 400:
            response.read()
        hf_raise_for_status(response)
        if start and response.status_code != PARTIAL_CONTENT:  # the server sends all bytes again
            file.truncate(0)
            progress.add(-start)
        for chunk in response.iter_raw():
            file.write(chunk)
            progress.add(len(chunk))


def _partial_size(blobs: Path, file: RepoFile) -> int:
    if file.lfs is None:
        return 0
    if (blobs / file.lfs.sha256).exists():
        return file.size
    partial = blobs / f"{file.lfs.sha256}.incomplete"
    return partial.stat().st_size if partial.exists() else 0


class _Progress:
    """Counts the bytes that arrive in all threads, and emits `StageProgress` once a second."""

    def __init__(
        self, nbytes: int, emit: Emit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stopped = threading.Event()
        """Set to end the downloads of all threads at their next bytes."""
        self._total = max(1, math.ceil(nbytes / MEGABYTE))
        self._emit = emit
        self._clock = clock
        self._nbytes = 0
        self._started_at = self._emitted_at = clock()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes, and emit the progress if a second has passed."""
        if self.stopped.is_set():
            raise ModelError("The download was stopped.")
        with self._lock:
            self._nbytes += nbytes
            now = self._clock()
            is_due = now - self._emitted_at >= 1
            if is_due:
                self._emitted_at = now
        if is_due:
            self._emit(self._event(min(self._nbytes // MEGABYTE, self._total - 1), now))

    def finish(self) -> None:
        """Emit that the download is complete."""
        self._emit(self._event(self._total, self._clock()))

    def _event(self, done: int, now: float) -> StageProgress:
        return StageProgress(STAGE, done, self._total, "MB", seconds=now - self._started_at)


class _NoBar:
    """A progress bar that shows nothing, for files of a few kilobytes, with tqdm's methods."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, nbytes: float | None = 1) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


# Errors


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """Turn errors of huggingface_hub into ones that say what to do; silence its warnings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    except ModelError:
        raise
    except (
        HTTP_ERROR,
        HFValidationError,
        EntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise ModelUnavailableError(_explanation(error, model)) from error
    finally:
        logging.set_verbosity(verbosity)


def _is_answer(error: BaseException) -> bool:
    """Return True if the hub has answered, with a refusal that another attempt would not change.

    Its own failures (status 5xx) and too many requests (429) are no answers.
    """
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return True
    status = _status(error)
    return status is not None and 400 <= status < 500 and status not in (408, 429)


def _status(error: BaseException) -> int | None:
    if not isinstance(error, HfHubHTTPError):
        return None
    return int(error.response.status_code)


def _explanation(error: Exception, model: HubModel) -> str:
    named = f"{model.setting} is {model.name!r}"
    known = [published.name for published in family_info(model.family).models]
    default = f"models of {model.family} are {', '.join(known)}" if known else "see the hub"
    if isinstance(error, GatedRepoError):
        return _explain_gate(model)
    if isinstance(error, RevisionNotFoundError):
        return (
            f"model.revision is {model.revision!r}, but {model.name} has no such branch, tag or "
            f"commit. Correct it, or remove it to use the newest version. See {model.page}"
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        private = "" if get_token() else ", or it is private and you are not logged in"
        return (
            f"{named}, but there is no such folder here, and {constants.ENDPOINT} has no such "
            f"model{private}. Correct the name; {default}."
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return (
            f"{named}, which has no {MODEL_INDEX} on the hub: it is not a pipeline that diffusers "
            f"has saved. Name another one; {default}. To use a single-file checkpoint from there, "
            "download it and name the file."
        )
    if _status(error) == 401:
        return (
            f"{constants.ENDPOINT} refuses your token, so {model.name} cannot be downloaded. Run "
            "`hf auth login` again, or correct HF_TOKEN."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return (
            f"The disk of {constants.HF_HUB_CACHE} is full, so {model.name} cannot be downloaded. "
            "Free some space, or set HF_HOME to a folder on another disk."
        )
    return (
        f"{named}, whose download failed ({_first_line(error)}). Start the same command again: it "
        "continues with the bytes that have arrived."
    )


def _explain_gate(model: HubModel) -> str:
    if get_token() is None:
        return (
            f"{model.name} is a gated model and you are not logged in.\n"
            f"  1. Accept its licence on the model's page: {model.page}\n"
            "  2. Run `hf auth login`, or set HF_TOKEN.\n"
            "  Then start the same command again."
        )
    return (
        f"{model.name} is a gated model. You are logged in, but your account has no access to it "
        "yet.\n"
        f"  1. Accept its licence on the model's page, with the same account: {model.page}\n"
        "     Some owners approve each request by hand, which takes a while.\n"
        "  2. If you use a fine-grained token, allow it to read gated models.\n"
        "  Then start the same command again."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
