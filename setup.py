"""Compile the memory shim beside the package; everything else is in pyproject.toml.

The shim is a plain shared library, not a Python module: it is the same for every Python, and an
install without a C compiler goes on without it.
"""

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildShim(build_ext):
    """Name the library as `gracetune.memory.shim` looks for it."""

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
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildShim, "bdist_wheel": AnyPython},
)
