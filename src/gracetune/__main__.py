"""`python -m gracetune`, for launchers that start a module on every rank."""

from __future__ import annotations

import sys

from gracetune.cli.main import main

sys.exit(main())
