"""Other libraries: each module imports its library when it is imported."""
