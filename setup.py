"""Build the C kernel for CPUs (secateur/inference/native), where there is a C compiler; the package works without it.

The library uses neither Python's nor torch's ABI, so one wheel fits every version of both.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = "secateur/inference/native/packed_linear.c"
OLDEST_GLIBC = (2, 17)  # of manylinux2014, which every Linux that runs torch has


class BuildLibrary(build_ext):
    """A plain shared library, not a Python module: no Python headers, no ABI in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        """secateur/inference/native/packed_linear.so."""
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self) -> None:
        """Compile with nothing but our own flags and libc."""
        for extension in self.extensions:
            extension.extra_compile_args = ["-O3", "-fvisibility=default", "-Wall", "-Wextra"]
            extension.extra_link_args = ["-static-libgcc", "-Wl,--strip-all"]
        super().build_extensions()


class Wheel(bdist_wheel):
    """py3-none-manylinux with the library inside, py3-none-any where it could not be built."""

    def get_tag(self) -> tuple[str, str, str]:
        """By what was built."""
        built = Path(self.get_finalized_command("build").build_lib, SOURCE).with_suffix(".so")
        if not built.is_file():
            return "py3", "none", "any"
        needed = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", built.read_bytes())]
        if needed and max(needed) <= OLDEST_GLIBC:
            return "py3", "none", "manylinux_2_17_x86_64.manylinux2014_x86_64"
        return "py3", "none", super().get_tag()[2]


def extensions() -> list[Extension]:
    """The library, on the systems it is written for; without a compiler setuptools warns and goes on."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return []
    digest = hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest()[:16]
    name = SOURCE.removesuffix(".c").replace("/", ".")
    return [Extension(name, [SOURCE], optional=True, define_macros=[("SECATEUR_SOURCE", f'"{digest}"')])]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
