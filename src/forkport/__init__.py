"""Keep a fork's patches alive across upstream releases.

The package extracts what a fork changed as numbered patches, predicts how they fit a newer
upstream, applies them to a fresh branch, runs validation commands, and rolls everything back on
request. It needs git and pydantic and imports nothing of gracetune; `gracetune port` is its command
line.

Reading order: extract.py, plan.py (merge.py, moved_code.py, three_way.py and upstream_history.py do
its work, with taken_changes.py and import_check.py), apply.py, validation_commands.py, report.py.
"""


class ForkportError(Exception):
    """An error for the user: the repository or the patch set does not allow the requested step."""
