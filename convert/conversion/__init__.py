"""A conversion from request to written checkpoint."""
