"""What a conversion costs in use: tasks of lm-evaluation-harness, retrieval over long contexts, loss by position."""
