"""`gracetune cache`: build, verify, clean up, inspect and import caches of encoded samples."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.atomic_files import check_writable
from gracetune.cli.main import add_set_argument, read_run
from gracetune.config.load import load_run_file
from gracetune.config.parse_text import FORMATS_BY_SUFFIX
from gracetune.errors import CacheError, ConfigError
from gracetune.events.run_control import reserve_folder
from gracetune.events.types import Notice
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    import torch

    from gracetune.cache.shard_store import ShardStore
    from gracetune.config.schema import RunFile
    from gracetune.events.types import Event
    from gracetune.models.family import Family

    Emit = Callable[[Event], None]
    Action = Callable[[argparse.Namespace, Emit], int]

HELP = (
    "Manage caches of encoded samples and captions. Name a cache by its folder, or by a run file "
    "that uses it."
)
WHERE = "folder of the cache, or a run file that uses it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `gracetune cache` and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add_action(name: str, run: Action, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run_action=run)
        add_set_argument(action)
        return action

    build = add_action("build", _build, "encode the entries that the cache of a run lacks")
    build.add_argument("run_file", metavar="RUN", help="run file that uses the cache")
    verify = add_action("verify", _verify, "compare every entry with its checksum")
    verify.add_argument("where", metavar="CACHE|RUN", type=Path, help=WHERE)
    verify.add_argument(
        "--repair",
        action="store_true",
        help="rebuild a damaged index, remove damaged entries; with a run file, encode them again",
    )
    collect = add_action("gc", _collect, "list entries that no named run needs, or delete them")
    collect.add_argument(
        "run_files", metavar="RUN", nargs="+", help="run files whose entries are kept"
    )
    collect.add_argument("--yes", action="store_true", help="delete them instead of listing them")
    inspect = add_action("inspect", _inspect, "show what an entry is and what its key depends on")
    inspect.add_argument("where", metavar="CACHE|RUN", type=Path, help=WHERE)
    inspect.add_argument(
        "what", metavar="KEY|FILE", help="a key, the beginning of a key, or the file of a sample"
    )
    stats = add_action("stats", _stats, "show how many entries of each kind a cache holds")
    stats.add_argument("where", metavar="CACHE|RUN", type=Path, help=WHERE)
    bring = add_action("import", _import, "import cache files of ai-toolkit or SimpleTuner")
    bring.add_argument("run_file", metavar="RUN", help="run file that uses the cache")
    bring.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder of the other tool's cache"
    )
    bring.add_argument(
        "--yes", action="store_true", help="import, instead of only listing what fits"
    )
    for action in (verify, collect, inspect, stats, bring):
        action.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand of `gracetune cache`."""
    from gracetune.events.console import console_sink

    action: Action = args.run_action
    # Progress goes to stderr, so that stdout has nothing but the answer.
    return action(args, console_sink(sys.stderr, is_terminal=False).handle)


def _build(args: argparse.Namespace, emit: Emit) -> int:
    _fill(_with_disk_cache(read_run(args.run_file, args.overrides)), emit)
    return 0


def _verify(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.maintenance import verify_folder

    reports = [(folder, *verify_folder(folder, emit, fix=args.repair)) for folder in _folders(args)]
    was_clean = all(before.is_clean for _, before, _ in reports)
    is_clean = all(after.is_clean for _, _, after in reports)
    if args.repair and not was_clean and _is_run_file(args.where):
        _fill(_with_disk_cache(load_run_file(args.where, args.overrides).run), emit)
    lines, answer = [], []
    for folder, before, after in reports:
        answer.append(
            {"folder": str(folder), "entries": after.num_entries, "damage": before.damage}
        )
        verdict = "no damage" if before.is_clean else f"{len(before.damage)} damaged"
        size = f"{after.num_entries} entries, {format_bytes(after.nbytes)}"
        lines.append(f"{folder}: {size}: {verdict}")
        lines += [f"  {what}: {why}" for what, why in before.damage.items()]
        if args.repair:
            lines += [f"  not repaired: {what}: {why}" for what, why in after.damage.items()]
    if not was_clean and not args.repair:
        lines.append("Use --repair to rebuild a damaged index and to remove damaged entries.")
    elif not was_clean:
        lines.append("Repaired." if is_clean else "Not all was repaired: stop other users of it.")
    _print(args, answer, lines)
    return 0 if is_clean else 1


def _collect(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.maintenance import compact, disk_nbytes, find_caches, find_unused
    from gracetune.cache.open_stores import cache_root
    from gracetune.cache.shard_store import ShardStore
    from gracetune.data.pipeline import required_keys
    from gracetune.models.family import load_family

    runs = [read_run(path, args.overrides) for path in args.run_files]
    required = {
        key for run in runs for key in required_keys(run, load_family(run.model, emit), emit)
    }
    verb = "deleted" if args.yes else "would delete"
    lines: list[str] = []
    answer: list[dict[str, object]] = []
    roots = dict.fromkeys(cache_root(run).resolve() for run in runs)
    for folder in (cache for root in roots for cache in find_caches(root)):
        with ShardStore(folder, emit) as store:
            unused = find_unused(store, required)
            freed = 0
            if args.yes:
                store.delete(unused.keys)
                freed = compact(store)
        answer.append(
            {
                "folder": str(folder),
                "entries": len(unused.keys),
                "nbytes": unused.nbytes,
                "kinds": unused.kinds,
                "deleted": args.yes,
                "freed_nbytes": freed,
            }
        )
        lines.append(f"{folder}: {verb} {len(unused.keys)} entries, {format_bytes(unused.nbytes)}")
        lines += [f"  {count} {kind}" for kind, count in unused.kinds.items()]
    for path in (path for run in runs for path in _unused_augmentation_epochs(run)):
        nbytes = sum(disk_nbytes(file) for file in path.rglob("*"))
        if args.yes:
            shutil.rmtree(path)
        answer.append({"folder": str(path), "nbytes": nbytes, "deleted": args.yes})
        lines.append(f"{path}: {verb} this augmentation epoch, {format_bytes(nbytes)}")
    if not args.yes:
        lines.append("Nothing was deleted. Use --yes to delete.")
    _print(args, answer, lines)
    return 0


def _inspect(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.maintenance import KEY_PARTS, explain_entry, find_entries

    with ExitStack() as stack:
        stores = _open_stores(args, stack, emit)
        found = [row for store in stores for row in find_entries(store, args.what, Path(args.what))]
    if not found:
        exists = Path(args.what).exists()
        reason = "no entry was made from this file" if exists else "there is no such file"
        raise CacheError(
            f"{args.what!r} has no entry in {args.where}: no key starts with it, and {reason}. "
            "Run `gracetune cache stats` to see what the cache holds."
        )
    lines = []
    for row in found:
        lines.append(f"{row.key}: {format_bytes(row.nbytes)} in shard {row.shard}")
        lines += [
            f"  {part}: {value}  ({KEY_PARTS.get(part, part)})" for part, value in row.about.items()
        ]
        lines += [f"  tensor {p.name}: {p.dtype} {list(p.shape)}" for p in row.tensors]
    _print(args, [explain_entry(row) for row in found], lines)
    return 0


def _stats(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.maintenance import cache_stats

    with ExitStack() as stack:
        answer = [cache_stats(store) for store in _open_stores(args, stack, emit)]
    lines = []
    for cache in answer:
        size, disk = (format_bytes(int(str(cache[name]))) for name in ("nbytes", "disk_nbytes"))
        lines.append(
            f"{cache['folder']}: {cache['entries']} entries, {size} in {cache['shards']} shards "
            f"({disk} on disk)"
        )
        kinds = cache["kinds"]
        assert isinstance(kinds, list), "stats gives a list of kinds"
        lines += [
            f"  {k['entries']} {k['kind']} by {k['encoder']}: {format_bytes(k['nbytes'])}"
            for k in kinds
        ]
    _print(args, answer, lines)
    return 0


def _import(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.import_foreign import import_foreign

    run = _with_disk_cache(read_run(args.run_file, args.overrides))
    report = import_foreign(run, _load_family(run, emit), args.folder, emit, write=args.yes)
    verb = "imported" if args.yes else "would import"
    count = len(report.imported)
    lines = [f"{verb} {count} {'entry' if count == 1 else 'entries'} from {args.folder}"]
    lines += [f"  left out {path}: {why}" for path, why in report.skipped.items()]
    if not count:
        lines.append("Nothing can be imported.")
    elif not args.yes:
        lines.append("Nothing was imported. Use --yes to import.")
    _print(args, {"imported": report.imported, "left_out": report.skipped}, lines)
    return 0


def _with_disk_cache(run: RunFile) -> RunFile:
    """Return the settings to fill a cache with; raise if the cache is not kept after the run.

    In the returned settings, latents and encoded text are both cached on disk, even if the file
    says memory, so that filling the cache needs little memory.
    """
    section = run.cache_config
    kept = section.persistent_cache or any(d.cache_latents_to_disk for d in run.datasets)
    if not kept and "disk" not in (section.vae_cache_type, section.text_cache_type):
        raise ConfigError(
            "cache_config.persistent_cache is false, so the cache of this run is not kept. "
            "Set it to true."
        )
    disk = section.model_copy(update={"vae_cache_type": "disk", "text_cache_type": "disk"})
    return run.model_copy(update={"cache_config": disk})


def _fill(run: RunFile, emit: Emit) -> None:
    """Fill the cache of a run: prepare the data as training does, but do not train."""
    from gracetune.cache.batch_transfer import build_batch_transfer
    from gracetune.data.pipeline import DataPipeline

    folder = Path(run.output_dir)
    check_writable(folder)
    with reserve_folder(folder, lambda text: emit(Notice(text, level="warning", fallback=True))):
        transfer = build_batch_transfer(run.gh200_optimizations, _device(), emit)
        DataPipeline(run, _load_family(run, emit), transfer, folder, emit).close()


def _unused_augmentation_epochs(run: RunFile) -> list[Path]:
    """Return the folders of augmentation epochs that a run will not read again.

    An augmentation epoch is the latents of one epoch, encoded with random crops of its own. A
    finished run needs none of them.
    """
    from gracetune.cache.augmentation_epochs import (
        FOLDER,
        augmentation_mode,
        rank_mark_files,
        unread_epochs,
    )
    from gracetune.cache.shard_store import is_cache
    from gracetune.train.checkpoint import CHECKPOINT_FOLDER, complete_checkpoints

    output = Path(run.output_dir)
    checkpoints = complete_checkpoints(output / CHECKPOINT_FOLDER)
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints]
    finished = bool(steps) and steps[-1] >= run.train.max_train_steps
    refreshed = any(augmentation_mode(section) == "refresh_each_epoch" for section in run.datasets)
    folder = output / FOLDER
    found = unread_epochs(folder, rank_mark_files(folder) if refreshed and not finished else [])
    return [path for path in found if is_cache(path)]


def _load_family(run: RunFile, emit: Emit) -> Family:
    from gracetune.models.family import load_family

    family = load_family(run.model, emit)
    family.to(_device())
    return family


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _open_stores(args: argparse.Namespace, stack: ExitStack, emit: Emit) -> list[ShardStore]:
    """Open all caches in a folder, or those of a run file."""
    from gracetune.cache.shard_store import ShardStore

    return [stack.enter_context(ShardStore(folder, emit)) for folder in _folders(args)]


def _folders(args: argparse.Namespace) -> list[Path]:
    """Return the folders of all caches in a folder, or of those of a run file."""
    from gracetune.cache.maintenance import find_caches

    where: Path = args.where
    if _is_run_file(where):
        from gracetune.cache.open_stores import cache_root

        where = cache_root(read_run(where, args.overrides))
    elif args.overrides:
        raise ConfigError(f"--set is for run files, but {where} is a folder. Remove --set.")
    return find_caches(where)


def _is_run_file(where: Path) -> bool:
    return where.suffix.lower() in FORMATS_BY_SUFFIX and not where.is_dir()


def _print(args: argparse.Namespace, answer: object, lines: Sequence[str]) -> None:
    print(json.dumps(answer, indent=2) if args.json else "\n".join(lines))
