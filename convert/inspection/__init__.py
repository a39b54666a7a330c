"""``kvfold inspect``: what a checkpoint is and what it can become. Imports neither torch nor transformers."""
