"""Run the command line as `python -m gracetune`, for launchers that start a module."""

from __future__ import annotations

import sys

from gracetune.cli.main import main

sys.exit(main())
