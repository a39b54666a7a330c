"""``kvfold push``: upload a converted checkpoint to the hub."""

from pathlib import Path

import click

from kvfold.convert.checkpoint.files import RECORD
from kvfold.convert.errors import InputError
from kvfold.convert.progress import ProgressStages


@click.command(short_help="Upload OUT to a model repository on the hub.")
@click.argument("out")
@click.argument("repo", metavar="REPO")
@click.option(
    "--private",
    is_flag=True,
    help="Create REPO as a private repository; an existing one stays as it is.",
)
def push(out: str, repo: str, private: bool) -> None:
    """Upload the converted checkpoint OUT, with its model card, to the model repository REPO
    (owner/name) on the hub.

    OUT is verified first, and only the files that its kvfold.json lists are uploaded. REPO is
    created if it does not exist. The token is that of `hf auth login`, or HF_TOKEN.
    """
    from kvfold.convert.checkpoint.digests import read_hashes
    from kvfold.convert.checkpoint.hub import HUB_ID, upload_files
    from kvfold.convert.measure.verify import require_intact, verify_checkpoint

    if "@" in repo or not HUB_ID.fullmatch(repo):
        raise InputError(f"REPO must be owner/name, not {repo!r}", field="repo")
    recorded, _ = read_hashes(Path(out))
    if not recorded:
        raise InputError(
            f"{out} has no {RECORD} with a list of files, so kvfold did not write it; give the"
            " output folder of a conversion"
        )
    with ProgressStages()(f"verifying {out}"):
        require_intact(verify_checkpoint(out))
    with ProgressStages()(f"uploading {out}"):
        url = upload_files(Path(out), [*recorded, RECORD], repo, private)
    click.echo(f"uploaded {out}: {url}")
