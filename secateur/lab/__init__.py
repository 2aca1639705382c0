"""The lab: what an experiment needs and a library does not. Data, models, training, pages."""
