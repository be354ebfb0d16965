"""The kinds of quantized weights, and the package that one of them needs."""

import warnings

import pytest

KINDS = ("int8", "fp8", "nf4")


def skip_without_package(kind):
    """Skip nf4 without bitsandbytes, which is not a development dependency.

    diffusers and peft import it wherever it is installed, which takes seconds.
    """
    if kind == "nf4":
        import_quietly("bitsandbytes")


def import_quietly(name):
    """Import a package whose import emits warnings, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")
