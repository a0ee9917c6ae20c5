"""What a run does on one rank, step by step: fit, evaluate, predict, and what they keep."""
