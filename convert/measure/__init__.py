"""The cost of a conversion: drift and perplexity."""
