"""The fork's module with the functions for unified memory."""

from gracetune.gh200 import *  # noqa: F403
