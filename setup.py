"""Compile the memory shim and staging's helper beside the package; all else is in pyproject.toml.

Both are plain shared libraries, not Python modules: they are the same for every Python. An install
from source on a machine without a C compiler leaves them out, and runs report what is missing. With
GRACETUNE_REQUIRE_LIBRARIES=1, which the builds of wheels set, a library that fails is an error.
"""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

IS_OPTIONAL = os.environ.get("GRACETUNE_REQUIRE_LIBRARIES") != "1"  # noqa: TID251


class BuildShim(build_ext):
    """Name each library as the module beside it looks for it."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class AnyPython(bdist_wheel):
    """One wheel a platform, whatever the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "gracetune.memory._shim",
            sources=["src/gracetune/memory/shim.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
            libraries=["dl", "pthread"],
            optional=IS_OPTIONAL,
        ),
        Extension(
            "gracetune.data._bulk_copy",
            sources=["src/gracetune/data/bulk_copy.c"],
            extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
            optional=IS_OPTIONAL,
        ),
    ],
    cmdclass={"build_ext": BuildShim, "bdist_wheel": AnyPython},
)
