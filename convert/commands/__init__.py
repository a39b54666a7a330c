"""The commands of ``kvfold``, one in each file ``NAME_command.py``: its options, its call and what
it prints.

``kvfold.convert.cli`` collects them. Modules that import torch are imported inside the functions,
so that ``--help`` stays quick.
"""
