"""Assert that a wheel holds every file of the packages, and of the folder ``recipes`` the recipes
alone.

``setuptools`` silently drops data files without ``package-data`` and folders that are missing from
``packages``.
"""

import sys
import zipfile
from pathlib import Path

PACKAGES = ("convert", "attention", "recipes")
MODULES = ("convert/**/*.py", "attention/**/*.py")
DATA = (
    "*/py.typed",
    "*/README.md",
    "convert/families/*.json",
    "convert/data/NOTICE",
    "convert/data/*.xz",
    "convert/data/demo/*",
    "recipes/*.toml",
    "recipes/*.yaml",
)
MUST = ("convert/data/demo/model.safetensors", "recipes/llama-2-7b-gqa-8.toml", "recipes/fsdp.yaml")


def matching(root: Path, patterns: tuple[str, ...]) -> set[str]:
    """Names in the wheel of the files under ``root`` that match one of the patterns."""
    found = (
        path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)
    )
    packaged = (
        name.removeprefix("convert/package/") for name in found if name.split("/")[0] in PACKAGES
    )
    return {f"kvfold/{name}" for name in packaged}


def problems(root: Path, found: set[str]) -> list[str]:
    """What is wrong with a wheel that holds the files ``found``, made of the repository ``root``."""
    recipes = matching(root, ("recipes/*.toml", "recipes/*.yaml"))
    wanted = matching(root, MODULES + DATA) - {"kvfold/recipes/README.md"}
    told = [
        f"missing: {name}"
        for name in sorted((wanted | {f"kvfold/{name}" for name in MUST}) - found)
    ]
    kvfold = {name for name in found if ".dist-info/" not in name}
    shipped = {name for name in kvfold if name.startswith("kvfold/recipes/")}
    told += [
        f"recipes ship without the files beside them, found {name}"
        for name in sorted(shipped - recipes)
    ]
    told += [
        f"not part of kvfold: {name}" for name in sorted(kvfold) if not name.startswith("kvfold/")
    ]
    return told


def main() -> None:
    wheel = sys.argv[1]
    found = set(zipfile.ZipFile(wheel).namelist())
    if told := problems(Path(__file__).resolve().parent.parent, found):
        raise SystemExit("\n  ".join([f"{wheel}:", *told]))
    print(f"{wheel}: {len(found)} files, every module, data file and recipe among them")


if __name__ == "__main__":
    main()
