"""The loops of a run on one rank: fit, evaluate and predict, and the data, metrics and random state in them."""
