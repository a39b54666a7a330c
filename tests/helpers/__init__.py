"""Helpers that several test files share; imported as ``helpers.NAME`` (pyproject.toml puts
``tests`` on the path).
"""
