"""Read and write checkpoints on demand, in bounded memory, and so that an output is either complete
or absent.
"""
