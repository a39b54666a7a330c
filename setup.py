"""What pyproject.toml cannot say of the build: of the folder ``recipes``, the recipes ship, not the scripts."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPackages(build_py):
    """Takes ``kvfold.recipes`` for data: its modules are scripts of the repository."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [] if package == "kvfold.recipes" else super().find_package_modules(package, package_dir)


setup(cmdclass={"build_py": BuildPackages})
