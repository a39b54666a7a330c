"""The attention of checkpoints that no stock class holds: the modeling file that they bring along, registered here."""
