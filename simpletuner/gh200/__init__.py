"""Run snippets of the GH200 guides from a checkout: `from simpletuner.gh200 import ...`.

This folder is not installed. An installed SimpleTuner is imported instead of it; there, gracetune's
hooks provide `simpletuner.gh200` (docs/simpletuner.md).
"""

from gracetune.gh200 import *  # noqa: F403
