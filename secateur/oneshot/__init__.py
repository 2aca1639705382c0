"""Pruning after training: calibration on a few batches, scores, gradient probing and reconstruction."""
