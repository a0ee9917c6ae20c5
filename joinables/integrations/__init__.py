"""Uneven inputs inside the training loops of frameworks: a package for each, imported when it is asked for."""
