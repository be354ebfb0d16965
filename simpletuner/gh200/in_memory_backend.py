"""The fork's module with the class that reads a folder into memory."""

from gracetune.gh200 import GH200InMemoryBackend as GH200InMemoryBackend
