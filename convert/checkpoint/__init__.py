"""Reading and writing checkpoints: lazily, in bounded memory, atomically."""
