"""What ``python -m joinables`` can do: a file for each command, ``trace`` and ``doctor``, and what they are made of."""
