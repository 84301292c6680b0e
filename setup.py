"""Adds directories of the repository to the wheel; the metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# `hybrid_imagenet.files.shipped_directory` finds them in a checkout and in an installation.
SHIPPED_DIRECTORIES = ("flags", "examples")


class BuildWithShippedFiles(build_py):
    """Copies the flag files and the examples into the package."""

    def run(self) -> None:
        """Builds the package."""
        super().run()
        # An editable installation uses the files of the checkout.
        if self.editable_mode:
            return
        for name in SHIPPED_DIRECTORIES:
            target = Path(self.build_lib, "hybrid_imagenet", name)
            self.mkpath(str(target))
            for source in sorted(Path(name).iterdir()):
                if source.is_file():
                    self.copy_file(str(source), str(target / source.name))


setup(cmdclass={"build_py": BuildWithShippedFiles})
