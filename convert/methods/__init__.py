"""Conversion methods and fold objectives, one file each; `registry` lists them."""
