"""What a conversion costs: drift and perplexity."""
