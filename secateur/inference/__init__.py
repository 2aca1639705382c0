"""Inference with zeros: the packed file format, packed layers, saving and loading, model cards."""
