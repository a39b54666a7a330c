"""kvfold: ``kvfold.convert`` converts checkpoints, ``kvfold.attention`` has the attention that they
compute with.

This folder is the package ``kvfold`` itself: with it, ``python -m kvfold`` does the same as the
command ``kvfold``.
"""
