"""How a rank that fails shows it, and how others learn who is to blame: one rule, told in ``join.failure.peers``."""
