"""What comes out: the checkpoint layouts that a conversion can be written in."""
