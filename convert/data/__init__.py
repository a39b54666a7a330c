"""Files that ship with kvfold: a small trained model, and calibration and held-out text."""
