"""Assert that a wheel holds every file of the packages: setuptools drops data without a word."""

import subprocess
import sys
import zipfile


def main() -> None:
    wheel = sys.argv[1]
    listing = subprocess.run(
        ["git", "ls-files", "convert", "attention"], check=True, capture_output=True, text=True
    )
    wanted = {f"kvfold/{name}" for name in listing.stdout.splitlines()}
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    shipped -= {"kvfold/__init__.py", "kvfold/__main__.py"}
    if wanted != shipped:
        raise SystemExit(f"{wheel}: missing or not wanted: {sorted(wanted ^ shipped)}")
    print(f"{wheel}: {len(shipped)} files")


if __name__ == "__main__":
    main()
