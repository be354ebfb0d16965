"""`gracetune cache`: build, verify, clean up, explain and import caches of encoded samples."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.load import FORMAT_OF_SUFFIX, load_run_file
from gracetune.errors import CacheError, ConfigError
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
    "Look after caches of encoded pictures and captions. A cache is named by its folder, or by a "
    "run file that uses it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One verb, several actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Action, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.set_defaults(run_action=run)
        return made

    build = action("build", _build, "encode what a run needs and its cache lacks, then stop")
    build.add_argument("run_file", metavar="RUN")
    check = action("verify", _verify, "compare every entry with its checksum")
    check.add_argument("where", metavar="CACHE|RUN", type=Path)
    check.add_argument(
        "--repair",
        action="store_true",
        help="forget what is damaged; with a run file, encode it again at once",
    )
    collect = action("gc", _collect, "delete what none of these runs needs; shows it by default")
    collect.add_argument("run_files", metavar="RUN", nargs="+")
    collect.add_argument("--yes", action="store_true", help="delete, instead of only showing")
    inspect = action("inspect", _inspect, "what an entry is, and why it has its key")
    inspect.add_argument("where", metavar="CACHE|RUN", type=Path)
    inspect.add_argument("what", metavar="KEY|FILE", help="a key, its beginning, or a sample")
    stats = action("stats", _stats, "how much a cache holds, of what")
    stats.add_argument("where", metavar="CACHE|RUN", type=Path)
    bring = action("import", _import, "take over cache files of ai-toolkit or SimpleTuner")
    bring.add_argument("run_file", metavar="RUN")
    bring.add_argument("folder", metavar="FOLDER", type=Path, help="where their files are")
    bring.add_argument(
        "--yes", action="store_true", help="import, instead of only showing what fits"
    )
    for made in (check, collect, inspect, stats, bring):
        made.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    from gracetune.events.console import console_sink

    act: Action = args.run_action
    # Progress goes to stderr: stdout is the answer's.
    return act(args, console_sink(sys.stderr, is_terminal=False).handle)


def _build(args: argparse.Namespace, emit: Emit) -> int:
    _fill(_persistent(args.run_file), emit)
    return 0


def _verify(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.maintenance import repair, verify

    reports = []
    with ExitStack() as stack:
        for store in _stores(args.where, stack, emit, repair=args.repair):
            report = verify(store, emit)
            reports.append((store, report))
            if args.repair and not report.is_clean:
                repair(store, report)
    clean = all(report.is_clean for _, report in reports)
    if args.repair and not clean and _is_run_file(args.where):
        _fill(_persistent(args.where), emit)
    lines, told = [], []
    for store, report in reports:
        damage = {f"entry {one.row.key}": one.why for one in report.damaged}
        damage |= {f"shard {name}": "its header cannot be read" for name in report.bad_headers}
        damage |= {f"index {place}": text for place, text in enumerate(report.index_problems)}
        told.append({"folder": str(store.folder), "entries": report.num_entries, "damage": damage})
        verdict = "all whole" if report.is_clean else f"{len(damage)} damaged"
        size = f"{report.num_entries} entries, {format_bytes(report.nbytes)}"
        lines.append(f"{store.folder}: {size}: {verdict}")
        lines += [f"  {what}: {why}" for what, why in damage.items()]
    if not clean:
        lines.append("repaired." if args.repair else "Give --repair to forget what is damaged.")
    _print(args, told, lines)
    return 0 if clean or args.repair else 1


def _collect(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.maintenance import find_caches, compact, disk_nbytes, find_unused
    from gracetune.cache.required_entries import cache_root, old_generations, required_keys
    from gracetune.cache.shard_store import ShardStore
    from gracetune.models.family import load_family

    runs = [load_run_file(path).run for path in args.run_files]
    wanted = {key for run in runs for key in required_keys(run, load_family(run.model), emit)}
    lines, told = [], []
    for folder in (cache for root in _distinct(map(cache_root, runs)) for cache in find_caches(root)):
        with ShardStore(folder, emit) as store:
            left = find_unused(store, wanted)
            freed = 0
            if args.yes:
                store.delete(left.keys)
                freed = compact(store)
        told.append(
            {
                "folder": str(folder),
                "entries": len(left.keys),
                "nbytes": left.nbytes,
                "kinds": left.kinds,
                "deleted": args.yes,
                "freed_nbytes": freed,
            }
        )
        verb = "deleted" if args.yes else "would delete"
        lines.append(f"{folder}: {verb} {len(left.keys)} entries, {format_bytes(left.nbytes)}")
        lines += [f"  {count} {kind}" for kind, count in left.kinds.items()]
    for path in (path for run in runs for path in old_generations(run)):
        nbytes = sum(disk_nbytes(file) for file in path.rglob("*"))
        if args.yes:
            shutil.rmtree(path)
        told.append({"folder": str(path), "nbytes": nbytes, "deleted": args.yes})
        verb = "deleted" if args.yes else "would delete"
        lines.append(f"{path}: {verb} the whole generation, {format_bytes(nbytes)}")
    if not args.yes:
        lines.append("Nothing was deleted. Give --yes to do so.")
    _print(args, told, lines)
    return 0


def _inspect(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.maintenance import KEY_PARTS, explain_entry, find_entries

    with ExitStack() as stack:
        stores = _stores(args.where, stack, emit)
        found = [row for store in stores for row in find_entries(store, args.what, Path(args.what))]
    if not found:
        there = Path(args.what).exists()
        file = "no entry was made of that file" if there else "there is no file of that path here"
        raise CacheError(
            f"{args.what!r} has no entry in {args.where}: no key begins so, and {file}. "
            "`gracetune cache stats` says what there is."
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
        told = [cache_stats(store) for store in _stores(args.where, stack, emit)]
    lines = []
    for one in told:
        size, disk = (format_bytes(int(str(one[name]))) for name in ("nbytes", "disk_nbytes"))
        lines.append(
            f"{one['folder']}: {one['entries']} entries, {size} in {one['shards']} shards "
            f"({disk} on disk)"
        )
        kinds = one["kinds"]
        assert isinstance(kinds, list), "stats gives a list of kinds"
        lines += [
            f"  {k['entries']} {k['kind']} by {k['encoder']}: {format_bytes(k['nbytes'])}"
            for k in kinds
        ]
    _print(args, told, lines)
    return 0


def _import(args: argparse.Namespace, emit: Emit) -> int:
    from gracetune.cache.import_foreign import import_foreign

    run = _persistent(args.run_file)
    outcome = import_foreign(run, _family(run), args.folder, emit, write=args.yes)
    verb = "imported" if args.yes else "would import"
    lines = [f"{verb} {len(outcome.imported)} entries from {args.folder}"]
    lines += [f"  left out {path}: {why}" for path, why in outcome.skipped.items()]
    if not args.yes:
        lines.append("Nothing was imported. Give --yes to do so.")
    _print(args, {"imported": outcome.imported, "left_out": outcome.skipped}, lines)
    return 0


def _persistent(run_file: str | Path) -> RunFile:
    """A run whose cache outlives it, with everything on disk: filling needs no memory for it."""
    run = load_run_file(run_file).run
    section = run.cache_config
    kept = section.persistent_cache or any(d.cache_latents_to_disk for d in run.datasets)
    if not kept and "disk" not in (section.vae_cache_type, section.text_cache_type):
        raise ConfigError(
            "cache_config.persistent_cache is false, so this run's cache ends with it. "
            "Set it to true to keep what is built."
        )
    disk = section.model_copy(update={"vae_cache_type": "disk", "text_cache_type": "disk"})
    return run.model_copy(update={"cache_config": disk})


def _fill(run: RunFile, emit: Emit) -> None:
    """Prepare as training does, and stop before the first step."""
    from gracetune.cache.batch_transfer import build_batch_transfer
    from gracetune.data.pipeline import build_pipeline

    folder = Path(run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    mover = build_batch_transfer(run.gh200_optimizations, _device(), emit)
    build_pipeline(run, _family(run), mover, folder, emit).close()


def _family(run: RunFile) -> Family:
    from gracetune.models.family import load_family

    family = load_family(run.model)
    family.to(_device())
    return family


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _stores(where: Path, stack: ExitStack, emit: Emit, *, repair: bool = False) -> list[ShardStore]:
    from gracetune.cache.maintenance import find_caches

    if _is_run_file(where):
        from gracetune.cache.required_entries import cache_root

        where = cache_root(load_run_file(where).run)
    return [stack.enter_context(_store(path, emit, repair)) for path in find_caches(where)]


def _store(folder: Path, emit: Emit, repair: bool) -> ShardStore:
    from gracetune.cache.index import DamagedIndexError
    from gracetune.cache.shard_store import ShardStore, cache_paths, rebuild_index

    try:
        return ShardStore(folder, emit)
    except DamagedIndexError:
        if not repair:
            raise
        rebuild_index(*cache_paths(folder), emit)
        return ShardStore(folder, emit)


def _is_run_file(where: Path) -> bool:
    return where.suffix.lower() in FORMAT_OF_SUFFIX and not where.is_dir()


def _distinct(paths: Sequence[Path] | map[Path]) -> list[Path]:
    return [*dict.fromkeys(path.resolve() for path in paths)]


def _print(args: argparse.Namespace, told: object, lines: Sequence[str]) -> None:
    print(json.dumps(told, indent=2) if args.json else "\n".join(lines))
