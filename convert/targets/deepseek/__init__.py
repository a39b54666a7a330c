"""The stock DeepSeek-V3 class as a target."""
