"""Absorbed decoding of stock DeepSeek-layout models."""
