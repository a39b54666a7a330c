"""kvfold.attention: every attention variant, exact, cached and fast. Imports nothing from kvfold.convert."""
