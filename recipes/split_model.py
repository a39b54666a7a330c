"""Split a checkpoint's files into parts of at most 60 MB, for places that take no larger ones, and
join them again.

    python recipes/split_model.py split MODEL PARTS  # PARTS/manifest.json, 0000.part, ...
    python recipes/split_model.py join PARTS MODEL   # where they arrived

Every file of MODEL's folder travels, but for what lies in its subfolders. The manifest has the hash
of every part and of every file; `join` checks both, and names what is missing or damaged. It needs
no package.
"""

import argparse
import hashlib
import json
from pathlib import Path

MEGABYTES = 60


def split(model: Path, parts: Path, size: int) -> list[Path]:
    """Write the files of ``model`` to ``parts`` as pieces of at most ``size`` bytes; returns the
    pieces.
    """
    parts.mkdir(parents=True)
    manifest = {}
    made = []
    for path in sorted(each for each in model.iterdir() if each.is_file()):
        whole = hashlib.sha256()
        pieces = []
        with path.open("rb") as file:
            while piece := file.read(size):
                made.append(parts / f"{len(made):04}.part")
                made[-1].write_bytes(piece)
                whole.update(piece)
                pieces.append({"part": made[-1].name, "sha256": hashlib.sha256(piece).hexdigest()})
        manifest[path.name] = {"sha256": whole.hexdigest(), "parts": pieces}
    (parts / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return made


def join(parts: Path, model: Path) -> list[Path]:
    """Write the files whose pieces are in ``parts`` to the new folder ``model``; returns the files.

    Raises SystemExit, naming every piece that is missing or damaged, before anything is written.
    """
    manifest = json.loads((parts / "manifest.json").read_text())
    wrong = []
    for piece in (piece for entry in manifest.values() for piece in entry["parts"]):
        path = parts / piece["part"]
        if not path.exists():
            wrong.append(f"{path} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != piece["sha256"]:
            wrong.append(f"{path} is damaged: its hash is not that in manifest.json")
    if wrong:
        raise SystemExit("; ".join(wrong) + "; copy them again")
    model.mkdir(parents=True)
    for name, entry in manifest.items():
        whole = hashlib.sha256()
        with (model / Path(name).name).open("wb") as file:
            for piece in entry["parts"]:
                content = (parts / piece["part"]).read_bytes()
                whole.update(content)
                file.write(content)
        if whole.hexdigest() != entry["sha256"]:
            raise SystemExit(
                f"{model / name}: its parts are whole, but in another order than in manifest.json"
            )
    return [model / name for name in manifest]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["split", "join"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a folder that does not exist")
    parser.add_argument(
        "--megabytes", type=float, default=MEGABYTES, help="of a part, at most (10^6 bytes)"
    )
    chosen = parser.parse_args()
    if chosen.target.exists():
        raise SystemExit(f"{chosen.target} exists already; name a new folder")
    if chosen.what == "split":
        made = split(chosen.source, chosen.target, int(chosen.megabytes * 1e6))
    else:
        made = join(chosen.source, chosen.target)
    print(
        f"{len(made)} files in {chosen.target},"
        f" {sum(path.stat().st_size for path in made) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
