"""Calibration and evaluation text: reading documents, tokenizing them and cutting them into
sequences.
"""
