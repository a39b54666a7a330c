"""The package's README: every function that it names is there."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import kvfold.convert

README = (Path(kvfold.convert.__file__).parent / "README.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"\b(?:transforms|walk|targets|training|text)(?:\.\w+)+", README)))


def test_names_are_read_from_the_text():
    assert len(NAMES) > 30
    assert "transforms.latent.als.alternate" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_named_functions_exist(name):
    module, attribute = name.rsplit(".", 1)
    assert callable(getattr(import_module(f"kvfold.convert.{module}"), attribute))


def test_links_lead_to_files():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in link:
            assert (Path(kvfold.convert.__file__).parent / link).exists(), link
