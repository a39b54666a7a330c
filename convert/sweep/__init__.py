"""``kvfold sweep``: many targets fitted and measured in one walk over the source's layers, to choose among them."""
